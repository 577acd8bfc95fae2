// Weights as they are stored, and as panels: packed ones are read in place, quantised ones are decoded a panel at a time
// into the cache, to the values (rounded to bf16) that kernels/dequantize.py gives.
#pragma once

#include "parallel.h"
#include "transpose.h"

// The fields of `StoredWeights` in library.py, in its order; one layer's, or all experts' one after the other.
struct StoredWeights {
  const void* data;
  const void* scale;      // fp8: float [E, ceil(rows / block_rows), ceil(inner / block_columns)]; MXFP4: bytes
  int64_t rows, inner;    // of one expert: outputs and inputs
  int32_t storage;        // hpcgen::Storage
  int32_t block_rows, block_columns;  // of fp8
};

namespace hpcgen {

enum class Storage : int32_t { panels = 0, fp8_block = 1, mxfp4 = 2 };

// Both small formats are read by moving their bits to where a float has them: the value is then a fixed power of two too
// small, subnormals included.

// Sixteen float8_e4m3fn.
inline F32x16 from_fp8(const uint8_t* bytes) {
  const Units16 all = load_bytes(bytes), magnitude = all & units(0x7f);
  const Units16 number = where_equal(magnitude, units(0x7f), units(0x7fc00000), shift_left<20>(magnitude));
  return as_floats(number | shift_left<24>(all & units(0x80))) * broadcast(0x1p120f);
}

// Sixteen e2m1 of eight bytes, the low nibble first.
inline F32x16 from_e2m1(const uint8_t* bytes) {
  const Units16 all = load_nibbles(bytes);
  return as_floats(shift_left<22>(all & units(7)) | shift_left<28>(all & units(8))) * broadcast(0x1p126f);
}

// 2^(exponent - 127).
inline float from_e8m0(uint8_t exponent) {
  const uint32_t bits = exponent == 0 ? 0x00400000u : static_cast<uint32_t>(exponent) << 23;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// The weights of one expert, or of a dense layer.
class Weights {
 public:
  Weights(const StoredWeights& stored, int64_t expert) : stored_(&stored), expert_(expert) {}

  int64_t units() const { return stored_->inner / 2; }

  // Panel p: outputs [32 p, 32 p + 32). Decoded into `scratch` where the weights are quantised.
  const uint32_t* panel(int64_t p, Scratch& scratch) const {
    const int64_t row = expert_ * stored_->rows + p * kPanelRows;
    if (storage() == Storage::panels) return static_cast<const uint32_t*>(stored_->data) + row * units();
    uint32_t* panel = scratch.get<uint32_t>(2 * kPanelRows * units());
    uint32_t* rows = panel + kPanelRows * units();
    for (int64_t r = 0; r < kPanelRows; ++r) {
      auto* out = reinterpret_cast<bf16*>(rows + r * units());
      if (storage() == Storage::fp8_block)
        decode_fp8(p * kPanelRows + r, out);
      else
        decode_mxfp4(row + r, out);
    }
    for (int64_t top = 0; top < kPanelRows; top += kLanes)
      transpose_rows([&](int r) { return rows + (top + r) * units(); }, kLanes, units(), panel + top, kPanelRows);
    return panel;
  }

 private:
  static constexpr int64_t kPanelRows = 32;

  Storage storage() const { return static_cast<Storage>(stored_->storage); }

  void decode_fp8(int64_t row, bf16* out) const {
    const int64_t inner = stored_->inner, block = stored_->block_columns;
    const int64_t grid_rows = (stored_->rows + stored_->block_rows - 1) / stored_->block_rows;
    const int64_t grid_columns = (inner + block - 1) / block;
    const auto* bytes = static_cast<const uint8_t*>(stored_->data) + (expert_ * stored_->rows + row) * inner;
    const float* scales =
        static_cast<const float*>(stored_->scale) + (expert_ * grid_rows + row / stored_->block_rows) * grid_columns;
    for (int64_t k = 0; k < inner; k += kLanes) store(out + k, from_fp8(bytes + k) * broadcast(scales[k / block]));
  }

  void decode_mxfp4(int64_t row, bf16* out) const {
    constexpr int64_t block = 32;
    const int64_t blocks = stored_->inner / block;
    const auto* bytes = static_cast<const uint8_t*>(stored_->data) + row * blocks * (block / 2);
    const auto* exponents = static_cast<const uint8_t*>(stored_->scale) + row * blocks;
    for (int64_t b = 0; b < blocks; ++b, bytes += block / 2, out += block) {
      const F32x16 scale = broadcast(from_e8m0(exponents[b]));
      store(out, from_e2m1(bytes) * scale);
      store(out + kLanes, from_e2m1(bytes + block / 4) * scale);
    }
  }

  const StoredWeights* stored_;
  int64_t expert_;
};

}  // namespace hpcgen
