// The submodule _core.cuda; only where the core is built with CUDA.
#pragma once

#include <pybind11/pybind11.h>

namespace oasis {

namespace py = pybind11;

void bind_cuda(py::module_& m);
void bind_cuda_tokens(py::module_& m);  // called by bind_cuda

}  // namespace oasis
