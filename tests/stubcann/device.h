// State of the simulated devices, shared by the parts of libascendcl.so, and the functions that tests steer it with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

constexpr size_t kPageBytes = size_t{2} << 20;
constexpr int kMaxDevices = 16;

struct Allocation {
  size_t bytes;
  int device;
};

struct PhysicalMemory {
  size_t bytes;
  int device;  // -1: host memory
};

struct Mapping {
  PhysicalMemory* memory;
  size_t bytes;
};

struct World {
  std::mutex mutex;

  // From the environment, see README.md.
  uint64_t total_bytes;
  uint64_t others_bytes;
  uint32_t num_devices;
  std::string soc, cann_version, driver_version;
  bool log_to_stderr;

  uint64_t used_bytes[kMaxDevices] = {};
  std::map<uintptr_t, Allocation> allocations;
  std::map<uintptr_t, size_t> reservations;
  std::map<uintptr_t, Mapping> mappings;
  uintptr_t next_allocation, next_reservation;

  uint64_t num_charges = 0;            // device allocations of either kind, refused ones included
  std::set<uint64_t> failing_charges;  // their ordinals

  bool events_held = false;  // an event is complete only when told so, or waited for

  bool recording = false;
  std::string calls;  // what stubcann_drain returns

  World() { read_environment(); }
  void read_environment();
  void note(const char* format, ...) __attribute__((format(printf, 2, 3)));
};

World& world();
int current_device();

// A stream that has no work on it but recorded events. All handles lie in one array, so a later stream has the higher
// address: the allocator orders its pools by it.
struct Stream {
  uint64_t num_recorded, num_completed;
  void* capture;  // the graph being captured, or null
  int id;
};
void complete_all_streams();
