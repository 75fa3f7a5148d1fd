// The opponent: cuBLASLt's GEMM without any epilogue, D = A B^T in the storage type with fp32 accumulation, on the same operands.
#pragma once

#include <cublasLt.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device.hpp"

namespace coda::bench {

inline void check(cublasStatus_t s, std::string const& what) {
  if (s != CUBLAS_STATUS_SUCCESS) throw Error(Error::kFailed, what + ": " + cublasLtGetStatusString(s));
}

class Library {
 public:
  struct Operands {
    void const* a;
    void const* b;
    void* d;
  };

  // A is [m, k], or [k, m] for layout nt; B is [n, k] for layout tn, else [k, n]; D is [m, n]. All row-major and contiguous.
  Library(Type type, std::string const& layout, std::int64_t m, std::int64_t n, std::int64_t k, std::size_t workspace)
      : workspace_(workspace) {
    // cuBLASLt is column-major, so its matrices are the transposes of ours: D^T = B A^T, with our B in the place of its A.
    bool const a_transposed = layout == "nt", b_k_major = layout == "tn";
    cudaDataType_t const element = type == Type::kBf16 ? CUDA_R_16BF : CUDA_R_16F;
    cublasOperation_t const op_b = b_k_major ? CUBLAS_OP_T : CUBLAS_OP_N, op_a = a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtCreate(&handle_), "cublasLtCreate");
    check(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    check(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof op_b), "cuBLASLt: TRANSA");
    check(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof op_a), "cuBLASLt: TRANSB");
    auto const matrix = [&](cublasLtMatrixLayout_t* result, std::int64_t rows, std::int64_t columns) {
      check(cublasLtMatrixLayoutCreate(result, element, std::uint64_t(rows), std::uint64_t(columns), rows), "cublasLtMatrixLayoutCreate");
    };
    matrix(&b_, b_k_major ? k : n, b_k_major ? n : k);
    matrix(&a_, a_transposed ? m : k, a_transposed ? k : m);
    matrix(&d_, n, m);

    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    cublasStatus_t status =
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    int found = 0;
    algorithms_.resize(kAlgorithms);
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasLtMatmulAlgoGetHeuristic(handle_, operation_, b_, a_, d_, d_, preference, kAlgorithms, algorithms_.data(), &found);
    cublasLtMatmulPreferenceDestroy(preference);
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    algorithms_.resize(std::size_t(found));
    auto const failed = [](cublasLtMatmulHeuristicResult_t const& a) { return a.state != CUBLAS_STATUS_SUCCESS; };
    algorithms_.erase(std::remove_if(algorithms_.begin(), algorithms_.end(), failed), algorithms_.end());
    if (algorithms_.empty()) throw Error(Error::kFailed, "cuBLASLt has no algorithm for this GEMM");
  }
  Library(Library const&) = delete;
  Library& operator=(Library const&) = delete;
  ~Library() {
    cublasLtMatrixLayoutDestroy(a_);
    cublasLtMatrixLayoutDestroy(b_);
    cublasLtMatrixLayoutDestroy(d_);
    cublasLtMatmulDescDestroy(operation_);
    cublasLtDestroy(handle_);
  }

  void run(Operands const& o) const { check(matmul(best_, o), "cublasLtMatmul"); }

  // Times the heuristic's suggestions on `sets` and keeps the fastest one. The best of several passes counts, since the card's clock may
  // still rise in the first one.
  void tune(Timer& timer, std::vector<Operands> const& sets) {
    std::size_t next = 0;
    std::vector<double> best(algorithms_.size(), HUGE_VAL);
    for (int pass = 0; pass < 3; ++pass) {
      for (std::size_t i = 0; i < algorithms_.size(); ++i) {
        if (pass == 0 && matmul(i, sets[0]) != CUBLAS_STATUS_SUCCESS) continue;
        if (pass > 0 && best[i] == HUGE_VAL) continue;
        auto const call = [&] { check(matmul(i, sets[next++ % sets.size()]), "cublasLtMatmul"); };
        best[i] = std::min(best[i], timer.burst(pass == 0 ? 1 : calls_in(5, best[i]), call));
      }
    }
    best_ = std::size_t(std::min_element(best.begin(), best.end()) - best.begin());
    if (best[best_] == HUGE_VAL) throw Error(Error::kFailed, "none of cuBLASLt's algorithms ran");
  }

  int algorithms() const { return static_cast<int>(algorithms_.size()); }

 private:
  static constexpr int kAlgorithms = 8;

  cublasStatus_t matmul(std::size_t algorithm, Operands const& o) const {
    float const one = 1, zero = 0;
    return cublasLtMatmul(handle_, operation_, &one, o.b, b_, o.a, a_, &zero, o.d, d_, o.d, d_, &algorithms_[algorithm].algo,
                          workspace_.data(), workspace_.bytes(), nullptr);
  }

  Buffer workspace_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> algorithms_;
  std::size_t best_ = 0;
};

}  // namespace coda::bench
