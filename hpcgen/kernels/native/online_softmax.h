// The softmax of a row of scores that come a page at a time (Milakov and Gimelshein, 2018).
#pragma once

#include <algorithm>

#include "attention_call.h"
#include "vector.h"

namespace hpcgen {

constexpr float kLowest = -1e30f;  // finite: differences with it are no NaN

inline float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
}

// Turns the scores of one page, in place, into weights relative to the highest score so far; those outside [low, high)
// become 0, whatever they were. `sums` are the weighted values of the pages before, `total` the weights of these; where
// this page has a higher score they are brought down to it.
inline void weigh(int low, int high, float scale, float* scores, float* sums, int64_t columns, float& highest,
                  float& total) {
  constexpr int vectors = kPageTokens / kLanes;
  if (low >= high) {
    std::fill(scores, scores + kPageTokens, 0.0f);
    return;
  }
  const bool all = low == 0 && high == kPageTokens;
  F32x16 s[vectors];
  for (int v = 0; v < vectors; ++v) {
    s[v] = load(scores + v * kLanes) * broadcast(scale);
    if (!all) s[v] = select(lanes_between(low - v * kLanes, high - v * kLanes), s[v], broadcast(kLowest));
  }
  const float peak = maximum(max(max(s[0], s[1]), max(s[2], s[3])));
  if (peak > highest) {
    if (total > 0) {
      const float factor = exp(highest - peak);
      total *= factor;
      for (int64_t c = 0; c < columns; c += kLanes) store(sums + c, load(sums + c) * broadcast(factor));
    }
    highest = peak;
  }
  F32x16 weights = zero();
  for (int v = 0; v < vectors; ++v) {
    s[v] = exp(s[v] - broadcast(highest));
    if (!all) s[v] = select(lanes_between(low - v * kLanes, high - v * kLanes), s[v], zero());
    weights = weights + s[v];
    store(scores + v * kLanes, s[v]);
  }
  total += sum(weights);
}

}  // namespace hpcgen
