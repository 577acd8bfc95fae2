// Sixteen floats, on AVX-512 or on AVX2: all that the kernels need to know of the instruction set, but for AMX.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace hpcgen {

using bf16 = uint16_t;

constexpr int kLanes = 16;

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
inline float to_float(float x) { return x; }

#if defined(__AVX512F__)

struct F32x16 {
  __m512 v;
};
struct Mask16 {
  __mmask16 m;
};

inline F32x16 zero() { return {_mm512_setzero_ps()}; }
inline F32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 absolute(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline F32x16 copy_sign(F32x16 magnitude, F32x16 sign) {
  const __m512i bit = _mm512_set1_epi32(INT32_MIN);
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign.v),
                                                        _mm512_castps_si512(magnitude.v), 0xca))};
}
inline float sum(F32x16 a) { return _mm512_reduce_add_ps(a.v); }
inline float maximum(F32x16 a) { return _mm512_reduce_max_ps(a.v); }
// Lanes i with low <= i < high.
inline Mask16 lanes_between(int low, int high) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {static_cast<__mmask16>(_mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(low)) &
                                 _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(high)))};
}
inline F32x16 select(Mask16 mask, F32x16 a, F32x16 otherwise) {
  return {_mm512_mask_blend_ps(mask.m, otherwise.v, a.v)};
}
inline F32x16 round_to_int(F32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for whole n.
inline F32x16 scale_by_power(F32x16 a, F32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

inline F32x16 load(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

// Rounds to nearest even; a NaN stays one.
inline __m256i to_bf16(F32x16 a) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

// Lanes 0, 2, 4 .. of a and then of b; and lanes 1, 3, 5 ..
inline void split_pairs(F32x16 a, F32x16 b, F32x16& even, F32x16& odd) {
  const __m512i lanes = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even.v = _mm512_permutex2var_ps(a.v, lanes, b.v);
  odd.v = _mm512_permutex2var_ps(a.v, _mm512_add_epi32(lanes, _mm512_set1_epi32(1)), b.v);
}

// Sixteen 32-bit units: sixteen floats, or sixteen pairs of bf16.
struct Units16 {
  __m512i v;
};
inline Units16 load_units(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Units16 units(uint32_t bits) { return {_mm512_set1_epi32(static_cast<int>(bits))}; }
inline Units16 operator&(Units16 a, Units16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Units16 operator|(Units16 a, Units16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int Bits>
Units16 shift_left(Units16 a) {
  return {_mm512_slli_epi32(a.v, Bits)};
}
inline Units16 where_equal(Units16 a, Units16 b, Units16 value, Units16 otherwise) {
  return {_mm512_mask_mov_epi32(otherwise.v, _mm512_cmpeq_epi32_mask(a.v, b.v), value.v)};
}
// Sixteen bytes; and the sixteen halves of eight bytes, the lower ones first.
inline Units16 load_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Units16 load_nibbles(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_or_si512(_mm512_and_si512(bytes, _mm512_set1_epi64(0x0f)),
                          _mm512_slli_epi64(_mm512_srli_epi64(bytes, 4), 32))};
}
inline F32x16 as_floats(Units16 u) { return {_mm512_castsi512_ps(u.v)}; }
inline F32x16 even_of_pairs(Units16 u) { return {_mm512_castsi512_ps(_mm512_slli_epi32(u.v, 16))}; }
inline F32x16 odd_of_pairs(Units16 u) {
  return {_mm512_castsi512_ps(_mm512_and_si512(u.v, _mm512_set1_epi32(INT32_C(-65536))))};
}

#else  // AVX2

struct F32x16 {
  __m256 lo, hi;
};
struct Mask16 {
  __m256 lo, hi;
};

inline F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 broadcast(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 absolute(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline F32x16 copy_sign(F32x16 magnitude, F32x16 sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.lo), _mm256_and_ps(bit, sign.lo)),
          _mm256_or_ps(_mm256_andnot_ps(bit, magnitude.hi), _mm256_and_ps(bit, sign.hi))};
}
inline float sum(F32x16 a) {
  float lanes[kLanes], total = 0;
  store(lanes, a);
  for (float x : lanes) total += x;
  return total;
}
inline float maximum(F32x16 a) {
  const __m256 m = _mm256_max_ps(a.lo, a.hi);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline Mask16 lanes_between(int low, int high) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(8));
  const auto between = [&](__m256i lane) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(low - 1)),
                                                _mm256_cmpgt_epi32(_mm256_set1_epi32(high), lane)));
  };
  return {between(first), between(second)};
}
inline F32x16 select(Mask16 mask, F32x16 a, F32x16 otherwise) {
  return {_mm256_blendv_ps(otherwise.lo, a.lo, mask.lo), _mm256_blendv_ps(otherwise.hi, a.hi, mask.hi)};
}
inline F32x16 round_to_int(F32x16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline F32x16 scale_by_power(F32x16 a, F32x16 n) {
  const auto scale = [](__m256 x, __m256 power) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(power), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
  };
  return {scale(a.lo, n.lo), scale(a.hi, n.hi)};
}

inline F32x16 load(const bf16* p) {
  const auto widen = [](const bf16* q) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  };
  return {widen(p), widen(p + 8)};
}

inline __m256i to_bf16(F32x16 a) {
  const auto round = [](__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256 safe =
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
    return _mm256_srli_epi32(_mm256_castps_si256(safe), 16);
  };
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(round(a.lo), round(a.hi)), 0xd8);
}

inline void split_pairs(F32x16 a, F32x16 b, F32x16& even, F32x16& odd) {
  const auto split = [](__m256 x, __m256 y, __m256& e, __m256& o) {
    const auto in_order = [](__m256 v) {
      return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
    };
    e = in_order(_mm256_shuffle_ps(x, y, 0x88));
    o = in_order(_mm256_shuffle_ps(x, y, 0xdd));
  };
  split(a.lo, a.hi, even.lo, odd.lo);
  split(b.lo, b.hi, even.hi, odd.hi);
}

struct Units16 {
  __m256i lo, hi;
};
inline Units16 load_units(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline Units16 units(uint32_t bits) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(bits));
  return {v, v};
}
inline Units16 operator&(Units16 a, Units16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline Units16 operator|(Units16 a, Units16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int Bits>
Units16 shift_left(Units16 a) {
  return {_mm256_slli_epi32(a.lo, Bits), _mm256_slli_epi32(a.hi, Bits)};
}
inline Units16 where_equal(Units16 a, Units16 b, Units16 value, Units16 otherwise) {
  return {_mm256_blendv_epi8(otherwise.lo, value.lo, _mm256_cmpeq_epi32(a.lo, b.lo)),
          _mm256_blendv_epi8(otherwise.hi, value.hi, _mm256_cmpeq_epi32(a.hi, b.hi))};
}
inline Units16 load_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Units16 load_nibbles(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const auto spread = [](__m128i four) {
    const __m256i wide = _mm256_cvtepu8_epi64(four);
    return _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi64x(0x0f)),
                           _mm256_slli_epi64(_mm256_srli_epi64(wide, 4), 32));
  };
  return {spread(bytes), spread(_mm_srli_si128(bytes, 4))};
}
inline F32x16 as_floats(Units16 u) { return {_mm256_castsi256_ps(u.lo), _mm256_castsi256_ps(u.hi)}; }
inline F32x16 even_of_pairs(Units16 u) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(u.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(u.hi, 16))};
}
inline F32x16 odd_of_pairs(Units16 u) {
  const __m256i high = _mm256_set1_epi32(INT32_C(-65536));
  return {_mm256_castsi256_ps(_mm256_and_si256(u.lo, high)), _mm256_castsi256_ps(_mm256_and_si256(u.hi, high))};
}

#endif

inline void store(bf16* p, F32x16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a)); }

// e^x to about 2 ulp; 0 below -87.3 (and for -inf), as far as floats go above.
inline F32x16 exp(F32x16 x) {
  x = max(min(x, broadcast(88.3762626647949f)), broadcast(-87.3365447505531f));
  const F32x16 n = round_to_int(x * broadcast(1.44269504088896341f));
  F32x16 r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  F32x16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return scale_by_power(fma(p, r * r, r + broadcast(1.0f)), n);
}

}  // namespace hpcgen
