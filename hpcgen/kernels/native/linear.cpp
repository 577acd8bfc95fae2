// Dense layers over weights packed in panels: projections, the output head, gated MLPs.
#include "gated.h"
#include "projection.h"

namespace hpcgen {
namespace {

template <class Kernel>
PackedRows<Kernel> packed_rows(Scratch& scratch, int64_t rows, int64_t width) {
  return {scratch.get<typename Kernel::RowUnit>(PackedRows<Kernel>::size(rows, width / 2)), rows, width / 2};
}

template <class Kernel>
void linear(const bf16* x, int64_t x_stride, int64_t rows, int64_t columns, int64_t inner, const uint32_t* weight,
            const bf16* bias, bf16* y, int64_t y_stride, int threads) {
  static thread_local Scratch scratch;
  const PackedRows<Kernel> packed = packed_rows<Kernel>(scratch, rows, inner);
  pack_rows<Kernel>(x, x_stride, packed, threads);
  project<Kernel>(packed, weight, bias, columns, y, y_stride, threads);
}

template <class Kernel>
void gated_mlp(const bf16* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t intermediate,
               const uint32_t* gate, const uint32_t* up, const uint32_t* down, const Gating& gating, bf16* y,
               int64_t y_stride, int threads) {
  static thread_local Scratch input_scratch, gated_scratch;
  const PackedRows<Kernel> input = packed_rows<Kernel>(input_scratch, rows, inner);
  const PackedRows<Kernel> gated = packed_rows<Kernel>(gated_scratch, rows, intermediate);
  pack_rows<Kernel>(x, x_stride, input, threads);
  gate_up<Kernel>({{input, gated, gate, up, nullptr, nullptr}}, gating, intermediate, threads);
  project<Kernel>(gated, down, nullptr, inner, y, y_stride, threads);
}

const uint32_t* units(const uint16_t* p) { return reinterpret_cast<const uint32_t*>(p); }

}  // namespace
}  // namespace hpcgen

// x [rows, inner], weight [columns, inner] packed, bias [columns] or null, y [rows, columns]. Strides are those of rows,
// in elements. inner and columns are multiples of 32.
extern "C" void hpcgen_linear(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t columns, int64_t inner,
                              const uint16_t* weight, const uint16_t* bias, uint16_t* y, int64_t y_stride,
                              int32_t threads) {
  using namespace hpcgen;
  if (rows == 0) return;
#if defined(HPCGEN_AMX)
  if (rows > DotKernel<bf16>::max_rows)
    return linear<AmxKernel>(x, x_stride, rows, columns, inner, units(weight), bias, y, y_stride, threads);
#endif
  linear<DotKernel<bf16>>(x, x_stride, rows, columns, inner, units(weight), bias, y, y_stride, threads);
}

// y [rows, inner] = (act(x gate^T) * (x up^T)) down^T; gate and up [intermediate, inner], down [inner, intermediate].
extern "C" void hpcgen_gated_mlp(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t intermediate,
                                 const uint16_t* gate, const uint16_t* up, const uint16_t* down, int32_t activation,
                                 uint16_t* y, int64_t y_stride, int32_t threads) {
  using namespace hpcgen;
  if (rows == 0) return;
  const Gating gating{static_cast<Activation>(activation), 0, 0, false};
#if defined(HPCGEN_AMX)
  if (rows > DotKernel<bf16>::max_rows)
    return gated_mlp<AmxKernel>(x, x_stride, rows, inner, intermediate, units(gate), units(up), units(down), gating, y,
                                y_stride, threads);
#endif
  gated_mlp<DotKernel<bf16>>(x, x_stride, rows, inner, intermediate, units(gate), units(up), units(down), gating, y,
                             y_stride, threads);
}
