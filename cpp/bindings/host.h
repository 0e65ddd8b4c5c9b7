// What _core says about the machine.
#pragma once

#include <pybind11/pybind11.h>

namespace oasis {

namespace py = pybind11;

void bind_host(py::module_& m);

}  // namespace oasis
