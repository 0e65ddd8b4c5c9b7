// The submodule _core.cuda; only where the core is built with CUDA.
#pragma once

#include <pybind11/pybind11.h>

namespace oasis {

namespace py = pybind11;

class Core;

void bind_cuda(py::module_& m);
void bind_cuda_core(py::module_& m, py::class_<Core>& core);
void bind_cuda_tokens(py::module_& m);  // called by bind_cuda

}  // namespace oasis
