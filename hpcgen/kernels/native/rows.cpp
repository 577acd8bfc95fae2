// What is done row by row between the products: root-mean-square norms, rotary embeddings, the largest logit.
#include <cmath>
#include <cstdint>

#include "parallel.h"
#include "vector.h"

// The fields of `RotaryCall` in library.py, in its order. Strides count elements.
struct RotaryCall {
  uint16_t* query;      // [tokens, heads, width], rotated in place
  const uint16_t* key;  // [tokens, groups, width]
  const uint16_t* value;  // [tokens, groups, value_width]
  int64_t row_stride;     // of all three
  const uint16_t* query_norm;  // [width] or null
  const uint16_t* key_norm;
  float epsilon;
  int32_t threads;
  const uint16_t* cosine;  // [tokens, width]
  const uint16_t* sine;
  uint16_t* key_pages;    // [pages, 64, groups, width]
  uint16_t* value_pages;  // [pages, 64, groups, value_width]
  int64_t key_page_stride, value_page_stride;
  const int64_t* slots;  // [tokens]
  int64_t tokens, heads, groups, width, value_width;
};

namespace hpcgen {
namespace {

constexpr int64_t kPageTokens = 64;

// body(first, last) over parts of `rows` rows, on one thread where the work is not worth waking others for.
template <class Body>
void over_rows(int threads, int64_t rows, int64_t elements_per_row, const Body& body) {
  constexpr int64_t worthwhile = 32768;  // elements
  const int64_t parts = rows * elements_per_row < worthwhile ? 1 : std::min<int64_t>(rows, 4 * threads);
  parallel_for(threads, parts, [&](int64_t p) { body(rows * p / parts, rows * (p + 1) / parts); });
}

// out = weight * (x / rms(x)), rounded to bf16 before and after the weight, as transformers' LlamaRMSNorm does.
void normalize(const bf16* x, const bf16* weight, float epsilon, int64_t width, bf16* out) {
  F32x16 low = zero(), high = zero();
  for (int64_t c = 0; c < width; c += 2 * kLanes) {
    const F32x16 a = load(x + c), b = load(x + c + kLanes);
    low = fma(a, a, low);
    high = fma(b, b, high);
  }
  const F32x16 scale = broadcast(1.0f / std::sqrt(sum(low + high) / static_cast<float>(width) + epsilon));
  for (int64_t c = 0; c < width; c += kLanes) {
    store(out + c, load(x + c) * scale);
    store(out + c, load(out + c) * load(weight + c));
  }
}

// Rotates the halves of a head against each other (Su et al., RoFormer; the order of GPT-NeoX).
void rotate(const bf16* head, const bf16* cosine, const bf16* sine, int64_t width, bf16* out) {
  const int64_t half = width / 2;
  for (int64_t c = 0; c < half; c += kLanes) {
    const F32x16 first = load(head + c), second = load(head + half + c);
    store(out + c, first * load(cosine + c) - second * load(sine + c));
    store(out + half + c, fma(second, load(cosine + half + c), first * load(sine + half + c)));
  }
}

void rotate_token(const RotaryCall& call, int64_t t, bf16* scratch) {
  const bf16 *cosine = call.cosine + t * call.width, *sine = call.sine + t * call.width;
  const auto normalized = [&](const bf16* head, const bf16* norm) {
    if (norm == nullptr) return head;
    normalize(head, norm, call.epsilon, call.width, scratch);
    return static_cast<const bf16*>(scratch);
  };
  bf16* query = call.query + t * call.row_stride;
  for (int64_t h = 0; h < call.heads; ++h, query += call.width)
    rotate(normalized(query, call.query_norm), cosine, sine, call.width, query);
  const int64_t page = call.slots[t] / kPageTokens, place = call.slots[t] % kPageTokens;
  const bf16* key = call.key + t * call.row_stride;
  bf16* key_slot = call.key_pages + page * call.key_page_stride + place * call.groups * call.width;
  for (int64_t g = 0; g < call.groups; ++g, key += call.width, key_slot += call.width)
    rotate(normalized(key, call.key_norm), cosine, sine, call.width, key_slot);
  std::memcpy(call.value_pages + page * call.value_page_stride + place * call.groups * call.value_width,
              call.value + t * call.row_stride, call.groups * call.value_width * sizeof(bf16));
}

// Index of the largest value, the first of several; of the first NaN where there is one.
int64_t largest(const bf16* row, int64_t width) {
  constexpr int64_t block = 16 * kLanes;
  float best = -INFINITY;
  int64_t where = 0, c = 0;
  bool finite = true;
  for (; c + block <= width && finite; c += block) {
    F32x16 peak = broadcast(-INFINITY), odd = zero();
    for (int64_t i = 0; i < block; i += kLanes) {
      const F32x16 x = load(row + c + i);
      peak = max(peak, x);
      odd = odd + (x - x);  // NaN for what is not finite
    }
    const float here = maximum(peak), none = sum(odd);
    finite = none == none;
    if (here > best) {
      best = here;
      where = c;
    }
  }
  if (!finite) {
    where = c = 0;
    best = -INFINITY;
  }
  // The largest so far is the first of its value from `where` on.
  if (finite && c > 0)
    while (to_float(row[where]) != best) ++where;
  for (; c < width; ++c) {
    const float x = to_float(row[c]);
    if (x != x) return c;
    if (x > best) {
      best = x;
      where = c;
    }
  }
  return where;
}

}  // namespace
}  // namespace hpcgen

// x and out [rows, width], contiguous rows; width a multiple of 32.
extern "C" void hpcgen_rms_norm(const uint16_t* x, int64_t x_stride, int64_t rows, const uint16_t* weight, float epsilon,
                                int64_t width, uint16_t* out, int64_t out_stride, int32_t threads) {
  hpcgen::over_rows(threads, rows, width, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      hpcgen::normalize(x + r * x_stride, weight, epsilon, width, out + r * out_stride);
  });
}

// Norms (where given) and rotates queries and keys, and writes keys and values to their slots. width: a multiple of 32,
// at most 1024.
extern "C" void hpcgen_rotate_and_write(const RotaryCall* call) {
  const int64_t elements = (call->heads + 2 * call->groups) * call->width;
  hpcgen::over_rows(call->threads, call->tokens, elements, [&](int64_t first, int64_t last) {
    hpcgen::bf16 scratch[1024];
    for (int64_t t = first; t < last; ++t) hpcgen::rotate_token(*call, t, scratch);
  });
}

// out[r] = index of the largest of x[r, :].
extern "C" void hpcgen_arg_max(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* out,
                               int32_t threads) {
  hpcgen::over_rows(threads, rows, width, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) out[r] = hpcgen::largest(x + r * x_stride, width);
  });
}
