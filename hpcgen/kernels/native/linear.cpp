// Dense layers: projections, the output head, gated MLPs.
#include "gated.h"
#include "projection.h"

namespace hpcgen {
namespace {

template <class Kernel>
PackedRows<Kernel> packed_rows(Scratch& scratch, int64_t rows, int64_t width) {
  return {scratch.get<typename Kernel::RowUnit>(PackedRows<Kernel>::size(rows, width / 2)), rows, width / 2};
}

template <class Kernel>
void linear(const bf16* x, int64_t x_stride, int64_t rows, const std::vector<Projection>& projections, int threads) {
  static thread_local Scratch scratch;
  const PackedRows<Kernel> packed = packed_rows<Kernel>(scratch, rows, 2 * projections.front().weights.units());
  pack_rows<Kernel>(x, x_stride, packed, threads);
  project<Kernel>(packed, projections, threads);
}

template <class Kernel>
void gated_mlp(const bf16* x, int64_t x_stride, int64_t rows, const StoredWeights& gate, const StoredWeights& up,
               const StoredWeights& down, const Gating& gating, bf16* y, int64_t y_stride, int threads) {
  static thread_local Scratch input_scratch, gated_scratch;
  const PackedRows<Kernel> input = packed_rows<Kernel>(input_scratch, rows, gate.inner);
  const PackedRows<Kernel> gated = packed_rows<Kernel>(gated_scratch, rows, gate.rows);
  pack_rows<Kernel>(x, x_stride, input, threads);
  gate_up<Kernel>({{input, gated, Weights(gate, 0), Weights(up, 0), 0, nullptr, nullptr}}, gating, gate.rows, threads);
  project<Kernel>(gated, {{Weights(down, 0), down.rows, nullptr, y, y_stride}}, threads);
}

}  // namespace
}  // namespace hpcgen

// x [rows, inner]; y [rows, outputs of all `count` weights, side by side]; a bias is null where there is none. Strides
// are those of rows, in elements. Outputs and inputs of all weights are multiples of 32.
extern "C" void hpcgen_linear(const uint16_t* x, int64_t x_stride, int64_t rows, int32_t count,
                              const StoredWeights* const* weights, const uint16_t* const* biases, uint16_t* y,
                              int64_t y_stride, int32_t threads) {
  using namespace hpcgen;
  if (rows == 0) return;
  std::vector<Projection> projections;
  for (int32_t i = 0; i < count; y += weights[i++]->rows)
    projections.push_back({Weights(*weights[i], 0), weights[i]->rows, biases[i], y, y_stride});
#if defined(HPCGEN_AMX)
  if (rows > DotKernel<bf16>::max_rows) return linear<AmxKernel>(x, x_stride, rows, projections, threads);
#endif
  linear<DotKernel<bf16>>(x, x_stride, rows, projections, threads);
}

// y = (act(x gate^T) * (x up^T)) down^T
extern "C" void hpcgen_gated_mlp(const uint16_t* x, int64_t x_stride, int64_t rows, const StoredWeights* gate,
                                 const StoredWeights* up, const StoredWeights* down, int32_t activation, uint16_t* y,
                                 int64_t y_stride, int32_t threads) {
  using namespace hpcgen;
  if (rows == 0) return;
  const Gating gating{static_cast<Activation>(activation), 0, 0, false};
#if defined(HPCGEN_AMX)
  if (rows > DotKernel<bf16>::max_rows)
    return gated_mlp<AmxKernel>(x, x_stride, rows, *gate, *up, *down, gating, y, y_stride, threads);
#endif
  gated_mlp<DotKernel<bf16>>(x, x_stride, rows, *gate, *up, *down, gating, y, y_stride, threads);
}
