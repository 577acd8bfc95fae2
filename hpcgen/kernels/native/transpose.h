// Transposes of 32-bit units in registers, to bring rows into the order the kernels multiply in.
#pragma once

#include "vector.h"

namespace hpcgen {

// destination[u * stride + r] = row(r)[u] for r < rows <= 16 and u < units. Writes nothing else.
template <class Row>
void transpose_rows(const Row& row, int rows, int64_t units, uint32_t* destination, int64_t stride) {
  int64_t first = 0;
#if defined(__AVX512F__)
  const __mmask16 used = static_cast<__mmask16>((1u << rows) - 1);
  for (; first < units; first += kLanes) {
    const int count = static_cast<int>(units - first < kLanes ? units - first : kLanes);
    const __mmask16 present = static_cast<__mmask16>((1u << count) - 1);
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r)
      a[r] = r < rows ? _mm512_maskz_loadu_epi32(present, row(r) + first) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int r = 0; r < 16; r += 2) {
      b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
      b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 16; r += 4) {
      a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
      a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
      a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
      a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    // a[4 i + j], 128-bit lane l: unit 4 l + j of rows 4 i .. 4 i + 3. What is left is a 4 x 4 transpose of lanes.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i low_even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
      const __m512i low_odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
      const __m512i high_even = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
      const __m512i high_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
      b[j] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
      b[4 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
      b[8 + j] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
      b[12 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
    uint32_t* out = destination + first * stride;
    if (rows == 16 && count == 16) {
#pragma GCC unroll 16
      for (int u = 0; u < 16; ++u) _mm512_storeu_si512(out + u * stride, b[u]);
    } else {
#pragma GCC unroll 16
      for (int u = 0; u < 16; ++u)
        if (u < count) _mm512_mask_storeu_epi32(out + u * stride, used, b[u]);
    }
  }
#else
  for (; rows % 8 == 0 && first + 8 <= units; first += 8) {
    for (int top = 0; top < rows; top += 8) {
      __m256 a[8], b[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) a[r] = _mm256_loadu_ps(reinterpret_cast<const float*>(row(top + r) + first));
#pragma GCC unroll 4
      for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
      }
#pragma GCC unroll 2
      for (int r = 0; r < 8; r += 4) {
        a[r] = _mm256_shuffle_ps(b[r], b[r + 2], 0x44);
        a[r + 1] = _mm256_shuffle_ps(b[r], b[r + 2], 0xee);
        a[r + 2] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0x44);
        a[r + 3] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0xee);
      }
      float* out = reinterpret_cast<float*>(destination + first * stride + top);
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
        _mm256_storeu_ps(out + u * stride, _mm256_permute2f128_ps(a[u], a[4 + u], 0x20));
        _mm256_storeu_ps(out + (4 + u) * stride, _mm256_permute2f128_ps(a[u], a[4 + u], 0x31));
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const uint32_t* source = row(r);
    for (int64_t u = first; u < units; ++u) destination[u * stride + r] = source[u];
  }
#endif
}

// units[c] = even[c] | odd[c] << 16 for 32 columns.
inline void interleave(const bf16* even, const bf16* odd, uint32_t* units) {
#if defined(__AVX512BW__)
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  _mm512_storeu_si512(units, _mm512_permutex2var_epi16(a, low, b));
  _mm512_storeu_si512(units + kLanes, _mm512_permutex2var_epi16(a, high, b));
#else
  for (int c = 0; c < 32; ++c) units[c] = even[c] | static_cast<uint32_t>(odd[c]) << 16;
#endif
}

}  // namespace hpcgen
