// The kernels that are not GEMMs: row statistics, the finalisers of partial sums, rotary embedding behind attention's backward, and programs
// without a product. Every sum has a fixed order that depends on the shape alone. Free of torch; csrc/host/reduce.hpp has the CPU twins.
#pragma once

#include <cstdint>

#include "coda/params.h"

namespace coda::reduce {

enum class DType { kBf16, kFp16, kFp32 };

// h[m, d] = x[m, d] gamma[d] (rounded to dtype),  rstd[m] = rsqrt(mean_d(x[m, d]^2) + eps). One pass over x. gamma null: no h.
struct RowStats {
  DType dtype;         // of x and h: bf16 or fp16
  DType weight_dtype;  // dtype or fp32
  std::int64_t m, d;
  void const* x;
  std::int64_t x_ld;
  void const* gamma;
  void* h;  // [m, d], contiguous
  float* rstd;
  float eps;
};
LaunchStatus row_stats(RowStats const& args, void* stream);

// The same for a LayerNorm: mean[m] = mean_d(x[m, d]),  rstd[m] = rsqrt(mean_d((x[m, d] - mean[m])^2) + eps). With `normalised`,
// h = (x - mean) rstd gamma + beta, rounded once, and gamma and beta may be null.
struct LayerStats : RowStats {
  void const* beta;  // weight_dtype
  bool normalised;
  float* mean;
};
LaunchStatus layer_stats(LayerStats const& args, void* stream);

// What a LayerNorm's weight and bias come to behind a product with w [n, d]: u[n] = sum_d(w[n, d] gamma[d]),
// v[n] = sum_d(w[n, d] beta[d]) + bias[n]. gamma null: ones; beta and bias null: zeros. One pass over w.
struct LayerVectors {
  DType dtype;         // of w and bias: bf16 or fp16
  DType weight_dtype;  // of gamma and beta: dtype or fp32
  std::int64_t n, d;
  void const* w;
  std::int64_t w_ld;
  void const* gamma;
  void const* beta;
  void const* bias;
  float* u;
  float* v;
};
LaunchStatus layer_vectors(LayerVectors const& args, void* stream);

// Finishes the RowPartial sink: out[m] = f(sum_t partials[t, m]), t ascending.
struct RowFinish {
  enum Function {
    kRstd,        // rsqrt(sum / width + eps)
    kCorrection,  // rstd^2 sum / width, see programs/norm.hpp
  };
  Function function;
  float const* partials;
  std::int64_t ld, tiles, m;
  float const* rstd;  // null: ones
  float width, eps;
  float* out;
};
LaunchStatus finish_rows(RowFinish const& args, void* stream);

// The same for a LayerNorm, of two sums a row at once.
struct LayerFinish {
  enum Function {
    kMoments,     // of x^2 and x: out = rstd, second_out = mean
    kCorrection,  // of dy (y - v) and dy u: out = rstd^2 S / width, second_out = -rstd T / width
  };
  Function function;
  float const* partials;
  float const* second;  // of the same layout
  std::int64_t ld, tiles, m;
  float const* rstd;  // for kCorrection
  float width, eps;
  float* out;
  float* second_out;
};
LaunchStatus finish_layer(LayerFinish const& args, void* stream);

// Finishes the ColPartial sink: out[n] = sum_g partials[g, n], in an order that depends on the number of groups alone.
LaunchStatus sum_groups(float const* partials, std::int64_t ld, std::int64_t groups, std::int64_t n, DType dtype, void* out, void* stream);

// Finishes the RowSoftmax sink: combines the tiles of a row, in an order that depends on their number alone. See programs/loss.hpp.
struct SoftmaxFinish {
  float const* partials;  // planes of [tiles][ld]
  std::int64_t plane, ld, planes, tiles, m;
  float* lse;
  float* mean_q;  // written with three planes or more
  float* total_z;  // these with five
  float* total_q;
};
LaunchStatus finish_softmax(SoftmaxFinish const& args, void* stream);

// In the place of exponentials (sinks.hpp) rstd times the gradient of their logits, see programs/loss.hpp.
struct ExponentialGradient {
  DType dtype;  // of the gradient: bf16 or fp16
  std::int64_t m, n;
  void* values;  // [m, n], rows 16 bytes aligned
  std::int64_t ld;
  float const* references;
  std::int64_t references_ld;
  float const* lse;
  float const* picked_z;
  float const* factors;  // by_softmax, by_all and by_target, one row each
  std::int64_t factors_ld;
  std::int64_t const* target;
  float const* rstd;  // null: ones
  float cap;          // 0: none
  float* dbias;       // [groups of kGradientRows rows, n], sums of the gradient of the logits; null: not wanted
};
LaunchStatus exponential_gradient(ExponentialGradient const& args, void* stream);
constexpr std::int64_t kGradientRows = 16;

// The same from logits, which stay: dz = rstd g with g the gradient of the logits, to which that which arrives at them is added.
struct KeptLogitGradient {
  DType dtype;  // of the tensors: bf16 or fp16
  std::int64_t m, n;
  void const* logits;
  std::int64_t ld;
  void const* incoming;  // null: none
  std::int64_t incoming_ld;
  float const* lse;
  float const* factors;  // as above
  std::int64_t factors_ld;
  std::int64_t const* target;
  float const* rstd;  // null: ones
  void const* bias;   // of the logits; null: none
  float cap;
  void* dz;  // [m, n], rows 16 bytes aligned with room for whole vectors
  std::int64_t dz_ld;
  float* dbias;  // as above
  float* dots;   // [groups of kGradientColumns columns, m], sums of g (logit - bias); null: not wanted
};
LaunchStatus kept_logit_gradient(KeptLogitGradient const& args, void* stream);
constexpr std::int64_t kGradientColumns = 2048;

// out[i] = values[i] * factor[0], a number on the device, with one rounding. out may be values; then nothing is read or written where the factor is 1.
LaunchStatus scale(DType dtype, void const* values, DType out_dtype, void* out, std::int64_t count, float const* factor, void* stream);

// Rotary embedding of whole rows, where it cannot be part of a GEMM's epilogue.
struct Rope {
  struct Gradient {  // of the heads of q, k or v: [batch, sequence, heads, head_dim] of any strides but 1 within a head
    void const* data;
    std::int64_t batch_stride, sequence_stride, head_stride;
    std::int64_t heads;
  };
  DType dtype;  // of y, out and the gradients: bf16 or fp16
  std::int64_t m, n;
  void const* y;  // [m, n]: the rotated columns of q, k and v, behind each other
  std::int64_t y_ld;
  void const* cos;
  std::int64_t cos_ld;
  void const* sin;
  std::int64_t sin_ld;
  bool wide_tables;  // fp32, else dtype
  bool interleaved;
  Rotation rotation;
  void* out;  // [m, n]
  std::int64_t out_ld;
  // For the backward:
  Gradient gradients[3];
  std::int64_t sequence;
  float const* rstd;  // null: ones
  void const* bias;   // null: none
  bool wide_bias;
  float* bias_partials;  // with a bias: [groups, n], the sums of the gradient of product over groups of kBiasRows rows
  float width;
  float* correction;
  // For QK-norm, forward and backward (programs/rope.hpp). product: [m, >= rotation.columns], the columns before norm and rotation.
  void const* product;
  std::int64_t product_ld;
  void const* gammas[2];  // [head_dim] of queries and of keys
  bool wide_gammas;
  float eps;
  float* gamma_partials;  // backward: [groups, 2 head_dim], of groups of kBiasRows rows: what the weights' gradients are sums of
};
// out = rstd times dy rotated back;  correction = rstd^2 S / width with S = sum_n(dy y), without the bias's part of y.
LaunchStatus rope_backward(Rope const& args, void* stream);
// out = y rotated; out may be y.
LaunchStatus rope_in_place(Rope const& args, void* stream);
// out = product with the heads of queries and keys normed and rotated; out may not be product, which has all n columns here.
LaunchStatus qk_norm_rope(Rope const& args, void* stream);
// out = rstd times the gradient of product, from dy;  correction as for rope_backward.
LaunchStatus qk_norm_rope_backward(Rope const& args, void* stream);
constexpr std::int64_t kBiasRows = 16;
constexpr std::int64_t kMaxNormedHead = 512;  // columns of a head, for the backward

// Runs a program without a product: the accumulator is the tile g.a, in the storage type. Partials as on the CPU back end: one tile a row, one
// group for every host::kGroupRows rows. For the programs that calls.cpp uses so.
LaunchStatus pointwise(char const* program, DType dtype, GemmArguments const& g);

}  // namespace coda::reduce
