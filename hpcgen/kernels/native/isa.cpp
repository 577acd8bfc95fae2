// What the operating system must allow before the instruction set can be used.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

// 0 when the kernels of this library may be called. AMX's tiles are large, so Linux gives them only to processes that
// ask; the permission is the whole process's, threads that exist already included.
extern "C" int32_t hpcgen_initialize() {
#if defined(__AMX_BF16__)
  constexpr int request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int tile_data = 18;               // XFEATURE_XTILEDATA
  return static_cast<int32_t>(syscall(SYS_arch_prctl, request_permission, tile_data));
#else
  return 0;
#endif
}
