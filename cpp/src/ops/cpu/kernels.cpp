// CPU kernels, compiled once per instruction set (OASIS_ISA names the build) and chosen at start by
// dispatch.cpp.
//
// No standard-library templates here: an inline function compiled for AVX-512 must never be the
// copy the linker keeps for all. A lane is one output (a column in linear, a query row in
// attention), so a result has one order of summation whatever the vector width, the number of rows
// or of threads.
#include "ops/cpu/kernels/attention.h"
#include "ops/cpu/kernels/linear.h"
#include "ops/cpu/kernels/rows.h"
#include "ops/cpu/kernels/scores.h"

#define OASIS_STR2(a) #a
#define OASIS_STR(a) OASIS_STR2(a)

namespace oasis {
namespace OASIS_ISA {

extern const Ops table;
const Ops table = {OASIS_STR(OASIS_ISA), pack_weight, linear,    rms_norm, silu_mul, rope,
                   attention_scratch,    attention,   summarize, score,    softmax};

}  // namespace OASIS_ISA
}  // namespace oasis
