// The rate of products that the instruction set allows, with all operands in registers. For benchmarks.
#include "amx_kernel.h"
#include "parallel.h"

namespace hpcgen {
namespace {

#if defined(HPCGEN_AMX)

// Operations of one repeat: four products of tiles, 16 x 16 x 32 each.
constexpr double kOperations = 4 * 2.0 * 16 * 16 * 32;

void products(int64_t repeats) {
  AmxKernel::begin();
  for (int64_t i = 0; i < repeats; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  AmxKernel::end();
}

#else

constexpr int kSums = DotKernel<bf16>::max_rows < 12 ? 5 : 12;
constexpr double kOperations = kSums * 2.0 * kLanes * 2;

void products(int64_t repeats) {
  F32x16 sums[kSums];
  const uint32_t zeros[kLanes] = {};
  Units16 panel = load_units(zeros);
  typename DotKernel<bf16>::RowUnit row = Element<bf16>::row_unit(0);
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = zero();
  for (int64_t n = 0; n < repeats; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = Element<bf16>::dot(sums[i], panel, row);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
#if defined(__AVX512F__)
      asm volatile("" : "+v"(sums[i].v));
#else
      asm volatile("" : "+x"(sums[i].lo), "+x"(sums[i].hi));
#endif
    }
  }
}

#endif

}  // namespace
}  // namespace hpcgen

// Runs `repeats` rounds on each thread and returns the floating-point operations done.
extern "C" double hpcgen_peak_products(int64_t repeats, int32_t threads) {
  hpcgen::parallel_for(threads, threads, [&](int64_t) { hpcgen::products(repeats); });
  return hpcgen::kOperations * static_cast<double>(repeats) * threads;
}
