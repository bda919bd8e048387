// libascendcl.so, device memory: host memory behind device addresses, charged in pages of 2 MiB against a total.

#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "acl/acl.h"

namespace {

// npusim hands out the same addresses (npusim/device/hbm.py).
constexpr uintptr_t kAllocationBase = 0x120000000000;
constexpr uintptr_t kReservationBase = 0x300000000000;
constexpr uint64_t kDefaultTotalBytes = (uint64_t(61.27 * 1024) << 20) / kPageBytes * kPageBytes;

size_t whole_pages(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

uint64_t number_from_environment(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

std::string text_from_environment(const char* name, const char* otherwise) {
  const char* text = getenv(name);
  return text ? text : otherwise;
}

bool put_host_memory_behind(uintptr_t address, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  return mmap((void*)address, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
}

// The callers of the functions below hold the mutex.

bool charge(int device, size_t bytes) {
  World& w = world();
  if (w.failing_charges.count(++w.num_charges)) return false;
  if (w.others_bytes + w.used_bytes[device] + bytes > w.total_bytes) return false;
  w.used_bytes[device] += bytes;
  return true;
}

aclError allocate(void** address, size_t bytes) {
  World& w = world();
  if (!address || !bytes) return ACL_ERROR_INVALID_PARAM;
  size_t charged = whole_pages(bytes);
  int device = current_device();
  if (!charge(device, charged)) {
    w.note("malloc 0 %zu oom", bytes);
    *address = nullptr;
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  uintptr_t at = w.next_allocation;
  if (!put_host_memory_behind(at, charged)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  w.next_allocation += charged;
  w.allocations[at] = {charged, device};
  w.note("malloc %#zx %zu", (size_t)at, bytes);
  *address = (void*)at;
  return ACL_SUCCESS;
}

// The entry of a map from start address to bytes in which an address lies.
template <class Entries, class Bytes>
auto containing(Entries& entries, uintptr_t address, Bytes bytes_of) {
  auto entry = entries.upper_bound(address);
  if (entry == entries.begin()) return entries.end();
  --entry;
  return address < entry->first + bytes_of(entry->second) ? entry : entries.end();
}

aclError copy(void* to, size_t capacity, const void* from, size_t bytes) {
  if (bytes > capacity) return ACL_ERROR_INVALID_PARAM;
  memmove(to, from, bytes);
  return ACL_SUCCESS;
}

aclError fill(void* to, size_t capacity, int32_t value, size_t bytes) {
  if (bytes > capacity) return ACL_ERROR_INVALID_PARAM;
  memset(to, value, bytes);
  return ACL_SUCCESS;
}

}  // namespace

World& world() {
  static World* instance = new World;  // never destroyed: torch_npu frees memory after static destructors began
  return *instance;
}

void World::read_environment() {
  total_bytes = number_from_environment("STUBCANN_HBM_BYTES", kDefaultTotalBytes);
  others_bytes = number_from_environment("STUBCANN_HBM_USED", 0);
  num_devices = (uint32_t)std::min<uint64_t>(number_from_environment("STUBCANN_DEVICES", 2), kMaxDevices);
  soc = text_from_environment("STUBCANN_SOC", "Ascend910B3");
  cann_version = text_from_environment("STUBCANN_CANN", "9.1.0");
  driver_version = text_from_environment("STUBCANN_DRIVER", "25.5.0");
  log_to_stderr = number_from_environment("STUBCANN_LOG", 0);
  next_allocation = kAllocationBase;
  next_reservation = kReservationBase;
}

void World::note(const char* format, ...) {
  if (!recording && !log_to_stderr) return;
  char line[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (recording) (calls += line) += '\n';
  if (log_to_stderr) fprintf(stderr, "[stubcann] %s\n", line);
}

// ---- for tests, through ctypes ----

// Read the environment anew. Only before the device is used: a forked child does that.
API void stubcann_read_environment() { world().read_environment(); }

API uint64_t stubcann_total_bytes() { return world().total_bytes; }

API uint64_t stubcann_used_bytes(int device) { return world().used_bytes[device]; }

API void stubcann_set_others_bytes(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().others_bytes = bytes;
}

// Refuse the device allocation after num_skipped more.
API void stubcann_fail_next(uint64_t num_skipped) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().failing_charges.insert(world().num_charges + 1 + num_skipped);
}

API void stubcann_record(int on) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().recording = on;
  world().calls.clear();
}

// Returns the bytes that are there; if they fit into the buffer, copies them and starts anew.
API size_t stubcann_drain(char* buffer, size_t capacity) {
  std::lock_guard<std::mutex> lock(world().mutex);
  std::string& calls = world().calls;
  size_t bytes = calls.size();
  if (buffer && bytes <= capacity) {
    memcpy(buffer, calls.data(), bytes);
    calls.clear();
  }
  return bytes;
}

// ---- allocations ----

API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  uint64_t used = w.others_bytes + w.used_bytes[current_device()];
  *total_bytes = w.total_bytes;
  *free_bytes = used > w.total_bytes ? 0 : w.total_bytes - used;
  return ACL_SUCCESS;
}

API aclError aclrtGetMemUsageInfo(int32_t, aclrtMemUsageInfo*, size_t, size_t* count) {
  if (count) *count = 0;
  return ACL_SUCCESS;
}

API aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return allocate(address, bytes);
}

API aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return allocate(address, bytes);
}

API aclError aclrtFree(void* address) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  auto entry = w.allocations.find((uintptr_t)address);
  if (entry == w.allocations.end()) return ACL_ERROR_INVALID_PARAM;
  munmap(address, entry->second.bytes);
  w.used_bytes[entry->second.device] -= entry->second.bytes;
  w.allocations.erase(entry);
  w.note("free %p", address);
  return ACL_SUCCESS;
}

API aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  attributes->pageSize = 4096;
  auto allocation = containing(w.allocations, (uintptr_t)address, [](const Allocation& a) { return a.bytes; });
  auto mapping = containing(w.mappings, (uintptr_t)address, [](const Mapping& m) { return m.bytes; });
  int device = -1;
  if (allocation != w.allocations.end()) device = allocation->second.device;
  if (mapping != w.mappings.end()) device = mapping->second.memory->device;
  if (device >= 0) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = device;
    attributes->pageSize = kPageBytes;
  }
  return ACL_SUCCESS;
}

// ---- host memory ----

API aclError aclrtMallocHost(void** address, size_t bytes) {
  return posix_memalign(address, 4096, bytes ? bytes : 1) ? ACL_ERROR_BAD_ALLOC : ACL_SUCCESS;
}

API aclError aclrtMallocHostWithCfg(void** address, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(address, bytes);
}

API aclError aclrtFreeHost(void* address) {
  free(address);
  return ACL_SUCCESS;
}

API aclError aclrtHostRegister(void* address, uint64_t, aclrtHostRegisterType, void** device_address) {
  *device_address = address;
  return ACL_SUCCESS;
}

API aclError aclrtHostUnregister(void*) { return ACL_SUCCESS; }

// ---- address ranges and physical memory (expandable segments) ----

API aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void* wanted, uint64_t) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  size_t reserved = whole_pages(bytes);
  uintptr_t at = (uintptr_t)wanted;
  for (auto& [start, length] : w.reservations)
    if (at < start + length && start < at + reserved) at = 0;
  if (!at) {
    at = w.next_reservation;
    w.next_reservation += reserved;
  }
  w.reservations[at] = reserved;
  w.note("reserve %#zx %zu", (size_t)at, reserved);
  *address = (void*)at;
  return ACL_SUCCESS;
}

API aclError aclrtReleaseMemAddress(void* address) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (!w.reservations.erase((uintptr_t)address)) return ACL_ERROR_INVALID_PARAM;
  w.note("release %p", address);
  return ACL_SUCCESS;
}

API aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t* bytes) {
  *bytes = kPageBytes;
  return ACL_SUCCESS;
}

API aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* properties,
                                 uint64_t) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  int device = current_device();
  if (properties && properties->location.type == ACL_MEM_LOCATION_TYPE_HOST) {
    device = -1;
  } else if (properties && properties->location.id < kMaxDevices) {
    device = (int)properties->location.id;
  }
  size_t charged = whole_pages(bytes);
  if (device >= 0 && !charge(device, charged)) {
    w.note("phys_malloc %zu oom", charged);
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  *handle = (aclrtDrvMemHandle) new PhysicalMemory{charged, device};
  w.note("phys_malloc %zu", charged);
  return ACL_SUCCESS;
}

API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  auto* memory = (PhysicalMemory*)handle;
  if (memory->device >= 0) w.used_bytes[memory->device] -= memory->bytes;
  w.note("phys_free %zu", memory->bytes);
  delete memory;
  return ACL_SUCCESS;
}

API aclError aclrtMapMem(void* address, size_t bytes, size_t, aclrtDrvMemHandle handle, uint64_t) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (!put_host_memory_behind((uintptr_t)address, bytes)) return ACL_ERROR_INVALID_PARAM;
  w.mappings[(uintptr_t)address] = {(PhysicalMemory*)handle, bytes};
  w.note("map %p %zu", address, bytes);
  return ACL_SUCCESS;
}

API aclError aclrtUnmapMem(void* address) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  auto entry = w.mappings.find((uintptr_t)address);
  if (entry == w.mappings.end()) return ACL_ERROR_INVALID_PARAM;
  munmap(address, entry->second.bytes);
  w.note("unmap %p %zu", address, entry->second.bytes);
  w.mappings.erase(entry);
  return ACL_SUCCESS;
}

API aclError aclrtMemSetAccess(void*, size_t, aclrtMemAccessDesc*, size_t) { return ACL_SUCCESS; }

// ---- copies, done at once on any stream ----

API aclError aclrtMemcpy(void* to, size_t capacity, const void* from, size_t bytes, aclrtMemcpyKind) {
  return copy(to, capacity, from, bytes);
}

API aclError aclrtMemcpyAsync(void* to, size_t capacity, const void* from, size_t bytes, aclrtMemcpyKind, aclrtStream) {
  return copy(to, capacity, from, bytes);
}

API aclError aclrtMemcpyAsyncWithCondition(void* to, size_t capacity, const void* from, size_t bytes, aclrtMemcpyKind,
                                           aclrtStream) {
  return copy(to, capacity, from, bytes);
}

API aclError aclrtMemset(void* to, size_t capacity, int32_t value, size_t bytes) {
  return fill(to, capacity, value, bytes);
}

API aclError aclrtMemsetAsync(void* to, size_t capacity, int32_t value, size_t bytes, aclrtStream) {
  return fill(to, capacity, value, bytes);
}
