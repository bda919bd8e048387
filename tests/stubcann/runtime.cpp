// libascendcl.so, the rest: devices, versions, streams, events, graph capture, descriptors. Streams have no work on
// them, so everything is done at once, except events that a test holds back.

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_dump.h"
#include "acl/acl_op_compiler.h"
#include "device.h"

namespace {

constexpr int kMaxStreams = 1 << 14;
constexpr int kNumOptions = 16;
constexpr int64_t kL2Bytes = int64_t{192} << 20;
constexpr int64_t kNumCores = 20;

thread_local int t_device = -1;
thread_local void* t_context = nullptr;
char g_contexts[kMaxDevices];  // only their addresses count
int64_t g_options[kNumOptions];
Stream g_streams[kMaxStreams];
std::atomic<int> g_num_streams{0};
std::atomic<uint32_t> g_num_graphs{0};

struct Event {
  Stream* stream;
  uint64_t ordinal;  // of the stream's events; 0: not recorded
  uint64_t nanoseconds;
};

struct Graph {
  uint32_t id;
};

struct TensorDescription {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> sizes;
};

Event* event(aclrtEvent handle) { return (Event*)handle; }
Stream* stream(aclrtStream handle) { return (Stream*)handle; }
const TensorDescription* description(const aclTensorDesc* handle) { return (const TensorDescription*)handle; }

uint64_t now_in_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * uint64_t{1000000000} + now.tv_nsec;
}

bool is_complete(const Event& event) {
  return !world().events_held || !event.stream || event.ordinal <= event.stream->num_completed;
}

}  // namespace

int current_device() { return t_device < 0 ? 0 : t_device; }

void complete_all_streams() {
  for (int id = 0; id < g_num_streams; ++id) g_streams[id].num_completed = g_streams[id].num_recorded;
}

// ---- for tests, through ctypes ----

// While on, events are complete only after stubcann_complete of their stream, or a wait.
API void stubcann_hold_events(int on) { world().events_held = on; }

API void stubcann_complete(aclrtStream handle) { stream(handle)->num_completed = stream(handle)->num_recorded; }

// ---- process and devices ----

API aclError aclInit(const char*) { return ACL_SUCCESS; }
API aclError aclFinalize() { return ACL_SUCCESS; }
API const char* aclGetRecentErrMsg() { return "stubcann: no error text"; }
API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
API aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

API const char* aclrtGetSocName() { return world().soc.c_str(); }

API aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = world().num_devices;
  return ACL_SUCCESS;
}

API aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || (uint32_t)device >= world().num_devices) return ACL_ERROR_RT_INVALID_DEVICEID;
  t_device = device;
  t_context = &g_contexts[device];
  return ACL_SUCCESS;
}

API aclError aclrtGetDevice(int32_t* device) {
  if (t_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = t_device;
  return ACL_SUCCESS;
}

API aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
API aclError aclrtResetDeviceForce(int32_t) { return ACL_SUCCESS; }

API aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (!t_context) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = t_context;
  return ACL_SUCCESS;
}

API aclError aclrtSetCurrentContext(aclrtContext context) {
  t_context = context;
  if (context) t_device = int((char*)context - g_contexts);
  return ACL_SUCCESS;
}

API aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return ACL_SUCCESS;
}

API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t* value) {
  *value = what == ACL_DEVICE_INFO_L2_SIZE ? kL2Bytes : kNumCores;
  return ACL_SUCCESS;
}

API aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = kNumCores;
  return ACL_SUCCESS;
}

API aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo* rates) {
  World& w = world();
  rates->cubeUtilization = rates->vectorUtilization = rates->aicpuUtilization = 0;
  rates->memoryUtilization = int32_t(100 * w.used_bytes[device] / w.total_bytes);
  return ACL_SUCCESS;
}

API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}

API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

API aclError aclrtDeviceGetBareTgid(int32_t* process) {
  *process = (int32_t)getpid();
  return ACL_SUCCESS;
}

// ---- versions and options ----

API aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion* version) {
  const std::string& text = package == ACL_PKG_NAME_DRIVER ? world().driver_version : world().cann_version;
  memset(version, 0, sizeof *version);
  if (text.empty()) return ACL_ERROR_INVALID_FILE;
  snprintf(version->version, sizeof version->version, "%s", text.c_str());
  return ACL_SUCCESS;
}

API aclError aclsysGetVersionStr(char* package, char* version) {
  bool is_driver = package && strstr(package, "driver");
  const std::string& text = is_driver ? world().driver_version : world().cann_version;
  if (text.empty()) return ACL_ERROR_INVALID_FILE;
  strcpy(version, text.c_str());
  return ACL_SUCCESS;
}

API aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
  *value = attribute != ACL_CANN_ATTR_JIT_COMPILE;
  return ACL_SUCCESS;
}

API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  if ((unsigned)option < kNumOptions) g_options[option] = value;
  return ACL_SUCCESS;
}

API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = (unsigned)option < kNumOptions ? g_options[option] : 0;
  return ACL_SUCCESS;
}

API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }
API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
API aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

API aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  if (actual) *actual = timeout;
  return ACL_SUCCESS;
}

API aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
API size_t aclGetCompileoptSize(aclCompileOpt) { return 256; }

API aclError aclGetCompileopt(aclCompileOpt, char* value, size_t capacity) {
  if (capacity) value[0] = 0;
  return ACL_SUCCESS;
}

API aclError aclopStartDumpArgs(uint32_t, const char*) { return ACL_SUCCESS; }
API aclError aclopStopDumpArgs(uint32_t) { return ACL_SUCCESS; }

// ---- streams ----

API aclError aclrtCreateStream(aclrtStream* handle) {
  int id = g_num_streams++;
  if (id >= kMaxStreams) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
  g_streams[id].id = id;
  *handle = &g_streams[id];
  return ACL_SUCCESS;
}

API aclError aclrtCreateStreamWithConfig(aclrtStream* handle, uint32_t, uint32_t) { return aclrtCreateStream(handle); }
API aclError aclrtDestroyStream(aclrtStream) { return ACL_SUCCESS; }
API aclError aclrtDestroyStreamForce(aclrtStream) { return ACL_SUCCESS; }

API aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  *id = handle ? stream(handle)->id : -1;
  return ACL_SUCCESS;
}

API aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

API aclError aclrtSynchronizeStream(aclrtStream handle) {
  if (handle) stream(handle)->num_completed = stream(handle)->num_recorded;
  return ACL_SUCCESS;
}

API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t) { return aclrtSynchronizeStream(handle); }

API aclError aclrtSynchronizeDevice() {
  complete_all_streams();
  return ACL_SUCCESS;
}

API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
API aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

API aclError aclrtProcessReport(int32_t) {
  usleep(1000);  // torch_npu's report thread calls this in a loop
  return ACL_SUCCESS;
}

API aclError aclrtLaunchCallback(aclrtCallback function, void* argument, aclrtCallbackBlockType, aclrtStream) {
  function(argument);
  return ACL_SUCCESS;
}

API aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* argument) {
  function(argument);
  return ACL_SUCCESS;
}

// ---- events ----

API aclError aclrtCreateEventExWithFlag(aclrtEvent* handle, uint32_t) {
  *handle = new Event{};
  return ACL_SUCCESS;
}

API aclError aclrtCreateEventWithFlag(aclrtEvent* handle, uint32_t flags) {
  return aclrtCreateEventExWithFlag(handle, flags);
}

API aclError aclrtDestroyEvent(aclrtEvent handle) {
  delete event(handle);
  return ACL_SUCCESS;
}

API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream on) {
  *event(handle) = {stream(on), on ? ++stream(on)->num_recorded : 0, now_in_nanoseconds()};
  return ACL_SUCCESS;
}

API aclError aclrtResetEvent(aclrtEvent handle, aclrtStream) {
  *event(handle) = {};
  return ACL_SUCCESS;
}

API aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  *status = is_complete(*event(handle)) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

API aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  *status = is_complete(*event(handle)) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  Event& waited = *event(handle);
  if (waited.stream && waited.ordinal > waited.stream->num_completed) waited.stream->num_completed = waited.ordinal;
  return ACL_SUCCESS;
}

API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  *milliseconds = float(double(int64_t(event(end)->nanoseconds - event(start)->nanoseconds)) / 1e6);
  return ACL_SUCCESS;
}

API aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  *microseconds = event(handle)->nanoseconds / 1000;
  return ACL_SUCCESS;
}

// ---- graphs: a capture keeps nothing, its replay does nothing ----

API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode) {
  if (!handle || stream(handle)->capture) return ACL_ERROR_INVALID_PARAM;
  stream(handle)->capture = new Graph{++g_num_graphs};
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  void* captured = handle ? stream(handle)->capture : nullptr;
  *status = captured ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph) *graph = captured;
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* graph) {
  if (!handle || !stream(handle)->capture) return ACL_ERROR_INVALID_PARAM;
  *graph = stream(handle)->capture;
  stream(handle)->capture = nullptr;
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return ACL_SUCCESS; }
API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream) { return ACL_SUCCESS; }

API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
  *group = (aclrtTaskGrp)handle;
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream, aclrtTaskGrp) { return ACL_SUCCESS; }
API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream) { return ACL_SUCCESS; }
API aclError aclmdlRIExecuteAsync(aclmdlRI, aclrtStream) { return ACL_SUCCESS; }
API aclError aclmdlRIDebugPrint(aclmdlRI) { return ACL_SUCCESS; }

API aclError aclmdlRIGetId(aclmdlRI graph, uint32_t* id) {
  *id = ((Graph*)graph)->id;
  return ACL_SUCCESS;
}

API aclError aclmdlRIDestroy(aclmdlRI graph) {
  delete (Graph*)graph;
  return ACL_SUCCESS;
}

// ---- descriptors ----

API aclDataBuffer* aclCreateDataBuffer(void*, size_t) { return (aclDataBuffer*)new char; }

API aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete (char*)buffer;
  return ACL_SUCCESS;
}

API aclTensorDesc* aclCreateTensorDesc(aclDataType type, int rank, const int64_t* sizes, aclFormat format) {
  auto* made = new TensorDescription{type, format, {}};
  if (rank > 0 && sizes) made->sizes.assign(sizes, sizes + rank);
  return (aclTensorDesc*)made;
}

API void aclDestroyTensorDesc(const aclTensorDesc* handle) { delete description(handle); }
API aclFormat aclGetTensorDescFormat(const aclTensorDesc* handle) { return description(handle)->format; }
API aclDataType aclGetTensorDescType(const aclTensorDesc* handle) { return description(handle)->type; }
API size_t aclGetTensorDescNumDims(const aclTensorDesc* handle) { return description(handle)->sizes.size(); }

API aclError aclGetTensorDescDimV2(const aclTensorDesc* handle, size_t index, int64_t* size) {
  *size = description(handle)->sizes.at(index);
  return ACL_SUCCESS;
}
