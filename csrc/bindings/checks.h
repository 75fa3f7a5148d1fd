// Argument checks. Each failure is one sentence that names the argument, what it is and what was expected, raised before any launch.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>

namespace coda::bindings {

using OptionalTensor = std::optional<at::Tensor>;

inline at::Tensor const* get(OptionalTensor const& t) { return t.has_value() && t->defined() ? &*t : nullptr; }

inline std::string shape_string(at::Tensor const& t) {
  std::ostringstream s;
  s << "[";
  for (std::int64_t i = 0; i < t.dim(); ++i) s << (i ? ", " : "") << t.size(i);
  s << "]";
  return s.str();
}

inline void check_floating(char const* name, at::Tensor const& t) {
  auto const d = t.scalar_type();
  TORCH_CHECK_TYPE(d == at::kFloat || d == at::kDouble || d == at::kHalf || d == at::kBFloat16, name, " has dtype ", d,
                   ", expected float32, float64, bfloat16 or float16");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, name, " has layout ", t.layout(), ", expected a dense (strided) tensor");
}

// `t` must agree with the tensor `other` in device and dtype.
inline void check_like(char const* name, at::Tensor const& t, char const* other_name, at::Tensor const& other) {
  TORCH_CHECK_VALUE(t.device() == other.device(), name, " is on ", t.device(), ", expected ", other.device(), " as ", other_name);
  TORCH_CHECK_TYPE(t.scalar_type() == other.scalar_type(), name, " has dtype ", t.scalar_type(), ", expected ", other.scalar_type(), " as ",
                   other_name);
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, name, " has layout ", t.layout(), ", expected a dense (strided) tensor");
}

// A norm's weight, which may be fp32 beside 16-bit activations.
inline void check_norm_weight(char const* name, at::Tensor const& t, char const* other_name, at::Tensor const& other) {
  TORCH_CHECK_VALUE(t.device() == other.device(), name, " is on ", t.device(), ", expected ", other.device(), " as ", other_name);
  bool const sixteen = other.scalar_type() == at::kHalf || other.scalar_type() == at::kBFloat16;
  TORCH_CHECK_TYPE(t.scalar_type() == other.scalar_type() || (sixteen && t.scalar_type() == at::kFloat), name, " has dtype ", t.scalar_type(),
                   ", expected ", other.scalar_type(), " as ", other_name, sixteen ? ", or float32" : "");
}

inline void check_shape(char const* name, at::Tensor const& t, at::IntArrayRef expected, char const* meaning) {
  TORCH_CHECK_VALUE(t.sizes() == expected, name, " has shape ", shape_string(t), ", expected ", expected, " (", meaning, ")");
}

inline void check_dim(char const* name, at::Tensor const& t, std::int64_t dim, char const* meaning) {
  TORCH_CHECK_VALUE(t.dim() == dim, name, " has shape ", shape_string(t), ", expected ", dim, " dimensions (", meaning, ")");
}

}  // namespace coda::bindings
