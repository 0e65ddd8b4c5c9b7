// What only a core on CUDA has: a step's place on the device, and its graphs.
#include "backend/cuda/cuda_backend.h"
#include "bindings/cuda.h"
#include "core.h"

#include <pybind11/stl.h>

namespace oasis {

void bind_cuda_core(py::module_& m, py::class_<Core>& core) {
  using namespace py::literals;
  using View = cuda::CudaBackend::StepView;
  using nogil = py::call_guard<py::gil_scoped_release>;
  auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  py::class_<View>(m, "StepView")
      .def_readonly("rows", &View::rows)
      .def_readonly("logits_rows", &View::logits_rows)
      .def_readonly("drafted", &View::drafted)
      .def_readonly("captured", &View::captured)
      .def_readonly("capture", &View::capture)
      .def_readonly("bucketed", &View::bucketed)
      .def_property_readonly("gather_ctas", [](const View& v) { return v.share.ctas; })
      .def_property_readonly("gather_in_flight", [](const View& v) { return v.share.in_flight; })
      .def_property_readonly("foreground_sms", [](const View& v) { return v.share.foreground_sms; })
      .def_property_readonly("row_ptr", [=](const View& v) { return address(v.row_list); })
      .def_property_readonly("logits_row_ptr",
                             [=](const View& v) { return address(v.logits_row_list); })
      .def_property_readonly("drafted_requests_ptr",
                             [=](const View& v) { return address(v.drafted_requests); });
  core.def_property_readonly("stream", [=](Core& c) { return address(c.cuda().foreground()); })
      .def(
          "view", [](Core& c, int variant) { return c.cuda().view(variant); },
          "variant"_a = cuda::CudaBackend::kEager)
      .def(
          "trim",
          [](Core& c, uintptr_t draft_counts, uintptr_t used) {
            c.cuda().trim(reinterpret_cast<const int32_t*>(draft_counts),
                          reinterpret_cast<int32_t*>(used));
          },
          "draft_counts"_a, "used"_a)
      .def("share_sms",
           [](Core& c, std::vector<GatherShare> shares) { c.cuda().share_sms(std::move(shares)); })
      .def_property_readonly("captured_steps", [](Core& c) { return c.cuda().captured_steps(); })
      .def("begin_capture", &Core::begin_capture)
      .def("end_capture", &Core::end_capture)
      .def("launch", &Core::launch, nogil())
      .def("mark_foreground", [](Core& c) { c.cuda().mark_foreground(); })
      .def(
          "wait_foreground", [](Core& c, int64_t step) { c.cuda().wait_foreground(step); },
          "step"_a, nogil());
}

}  // namespace oasis
