// Chooses the kernels this processor can run.
#include <stdexcept>

#include "oasis/ops.h"

namespace oasis {

#if defined(__x86_64__)
namespace avx2 {
extern const Ops table;
}
namespace avx512 {
extern const Ops table;
}

const Ops& cpu_ops() {
  static const Ops& chosen = []() -> const Ops& {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
      return avx512::table;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::table;
    throw std::runtime_error(
        "this processor has neither AVX2 with FMA nor AVX-512; the CPU backend needs one of them");
  }();
  return chosen;
}
#else
namespace generic {
extern const Ops table;
}

const Ops& cpu_ops() { return generic::table; }
#endif

}  // namespace oasis
