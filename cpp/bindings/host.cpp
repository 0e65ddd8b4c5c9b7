#include "bindings/host.h"

#include <stdexcept>

#include "host/limits.h"
#include "host/range.h"

namespace oasis {

void bind_host(py::module_& m) {
  using namespace py::literals;
  py::class_<MemoryLeft>(m, "MemoryLeft")
      .def_readonly("bytes", &MemoryLeft::bytes)
      .def_readonly("why", &MemoryLeft::why)
      .def_readonly("remedy", &MemoryLeft::remedy);
  m.def("memory_left", &memory_left, "assume_bytes"_a = 0, "root"_a = "/");
  m.def("usable_cpus", &usable_cpus, "root"_a = "/");
  m.def("memory_nodes", &memory_nodes, "root"_a = "/");
  m.def("node_of_pci_device", &node_of_pci_device, "bus_id"_a, "root"_a = "/");
  m.def("locked_memory_note", &locked_memory_note, "bytes"_a, "root"_a = "/");
  m.def(
      "fill_seconds",
      [](int64_t bytes, int num_threads) {
        if (bytes < 1 || num_threads < 1)
          throw std::invalid_argument("fill_seconds needs bytes >= 1 and num_threads >= 1");
        return fill_seconds(bytes, num_threads, [](int64_t, int64_t) {
          py::gil_scoped_acquire acquire;
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // Ctrl-C
        });
      },
      "bytes"_a, "num_threads"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace oasis
