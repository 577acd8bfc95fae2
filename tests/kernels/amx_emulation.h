// AMX tiles in plain C++, so that the code for AMX is tested on machines without it. Only what amx_kernel.h uses.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace amx_emulation {

struct Tile {
  alignas(64) unsigned char bytes[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

inline void load_config(const void* config) {
  const auto* bytes = static_cast<const unsigned char*>(config);
  configured = bytes[0] == 1;
  for (int t = 0; t < 8; ++t) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * t, sizeof row_bytes);
    configured = configured && row_bytes == 64 && bytes[48 + t] == 16;
  }
}
inline void load(int t, const void* base, size_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(tiles[t].bytes[r], static_cast<const char*>(base) + r * stride, 64);
}
inline void save(int t, void* base, size_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(base) + r * stride, tiles[t].bytes[r], 64);
}
// A tile that nobody configured faults on a real CPU; here its products are NaN.
inline void dot(int c, int a, int b) {
  for (int m = 0; m < 16; ++m) {
    float sums[16];
    std::memcpy(sums, tiles[c].bytes[m], 64);
    uint16_t row[32];
    std::memcpy(row, tiles[a].bytes[m], 64);
    for (int k = 0; k < 16; ++k) {
      uint16_t columns[32];
      std::memcpy(columns, tiles[b].bytes[k], 64);
      for (int n = 0; n < 16; ++n)
        sums[n] += widen(row[2 * k]) * widen(columns[2 * n]) + widen(row[2 * k + 1]) * widen(columns[2 * n + 1]);
    }
    for (int n = 0; n < 16 && !configured; ++n) sums[n] = NAN;
    std::memcpy(tiles[c].bytes[m], sums, 64);
  }
}

}  // namespace amx_emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) amx_emulation::load_config(config)
#define _tile_release() (amx_emulation::configured = false)
#define _tile_loadd(t, base, stride) amx_emulation::load(t, base, stride)
#define _tile_stored(t, base, stride) amx_emulation::save(t, base, stride)
#define _tile_zero(t) std::memset(&amx_emulation::tiles[t], 0, sizeof(amx_emulation::Tile))
#define _tile_dpbf16ps(c, a, b) amx_emulation::dot(c, a, b)
