// libhccl.so: communicators exist, collectives return at once and exchange nothing. Over one rank a collective copies
// its input, since then the result is known.

#include "hccl/hccl.h"

#include <cstdint>
#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {

struct Communicator {
  uint32_t num_ranks, rank;
  char name[64];
};

int g_num_communicators = 0;

Communicator* communicator(HcclComm handle) { return (Communicator*)handle; }

HcclResult make_communicator(uint32_t num_ranks, uint32_t rank, HcclComm* handle) {
  auto* made = new Communicator{num_ranks, rank, {}};
  snprintf(made->name, sizeof made->name, "stub_comm_%d", g_num_communicators++);
  *handle = made;
  return HCCL_SUCCESS;
}

size_t bytes_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 4;
  }
}

HcclResult copy_if_alone(void* to, const void* from, uint64_t count, HcclDataType type, HcclComm handle) {
  if (communicator(handle)->num_ranks == 1 && to != from) memcpy(to, from, count * bytes_of(type));
  return HCCL_SUCCESS;
}

}  // namespace

// ---- communicators ----

API HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  memset(root, 0, sizeof *root);
  return HCCL_SUCCESS;
}

API HcclResult HcclCommInitRootInfo(uint32_t num_ranks, const HcclRootInfo*, uint32_t rank, HcclComm* handle) {
  return make_communicator(num_ranks, rank, handle);
}

API HcclResult HcclCommInitRootInfoConfig(uint32_t num_ranks, const HcclRootInfo*, uint32_t rank, const HcclCommConfig*,
                                          HcclComm* handle) {
  return make_communicator(num_ranks, rank, handle);
}

API HcclResult HcclCreateSubCommConfig(HcclComm*, uint32_t num_ranks, uint32_t*, uint64_t, uint32_t rank,
                                       HcclCommConfig*, HcclComm* handle) {
  return make_communicator(num_ranks, rank, handle);
}

API HcclResult HcclCommDestroy(HcclComm handle) {
  delete communicator(handle);
  return HCCL_SUCCESS;
}

API HcclResult HcclGetCommName(HcclComm handle, char* name) {
  strcpy(name, communicator(handle)->name);
  return HCCL_SUCCESS;
}

API HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

API HcclResult HcclGetRankSize(HcclComm handle, uint32_t* num_ranks) {
  *num_ranks = communicator(handle)->num_ranks;
  return HCCL_SUCCESS;
}

API HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  *rank = communicator(handle)->rank;
  return HCCL_SUCCESS;
}

API uint32_t HcclGetCommConfigCapability() { return 2; }
API HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
API HcclResult HcclBarrier(HcclComm, aclrtStream) { return HCCL_SUCCESS; }

// ---- collectives ----

API HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp, HcclComm handle,
                             aclrtStream) {
  return copy_if_alone(to, from, count, type, handle);
}

API HcclResult HcclReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp, uint32_t,
                          HcclComm handle, aclrtStream) {
  return copy_if_alone(to, from, count, type, handle);
}

API HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream) {
  return copy_if_alone(to, from, count, type, handle);
}

API HcclResult HcclReduceScatter(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp, HcclComm handle,
                                 aclrtStream) {
  return copy_if_alone(to, from, count, type, handle);
}

API HcclResult HcclScatter(void* from, void* to, uint64_t count, HcclDataType type, uint32_t, HcclComm handle,
                           aclrtStream) {
  return copy_if_alone(to, from, count, type, handle);
}

API HcclResult HcclBroadcast(void*, uint64_t, HcclDataType, uint32_t, HcclComm, aclrtStream) { return HCCL_SUCCESS; }
API HcclResult HcclSend(void*, uint64_t, HcclDataType, uint32_t, HcclComm, aclrtStream) { return HCCL_SUCCESS; }
API HcclResult HcclRecv(void*, uint64_t, HcclDataType, uint32_t, HcclComm, aclrtStream) { return HCCL_SUCCESS; }
API HcclResult HcclBatchSendRecv(HcclSendRecvItem*, uint32_t, HcclComm, aclrtStream) { return HCCL_SUCCESS; }

API HcclResult HcclAlltoAll(const void*, uint64_t, HcclDataType, const void*, uint64_t, HcclDataType, HcclComm,
                            aclrtStream) {
  return HCCL_SUCCESS;
}

API HcclResult HcclAlltoAllV(const void*, const void*, const void*, HcclDataType, const void*, const void*, const void*,
                             HcclDataType, HcclComm, aclrtStream) {
  return HCCL_SUCCESS;
}

API HcclResult HcclAllGatherV(void*, uint64_t, void*, const void*, const void*, HcclDataType, HcclComm, aclrtStream) {
  return HCCL_SUCCESS;
}

API HcclResult HcclReduceScatterV(void*, const void*, const void*, void*, uint64_t, HcclDataType, HcclReduceOp, HcclComm,
                                  aclrtStream) {
  return HCCL_SUCCESS;
}
