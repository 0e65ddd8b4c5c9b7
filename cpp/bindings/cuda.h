// The submodule _core.cuda; only where the core is built with CUDA.
#pragma once

#include <pybind11/pybind11.h>

namespace oasis {

namespace py = pybind11;

void bind_cuda(py::module_& m);

}  // namespace oasis
