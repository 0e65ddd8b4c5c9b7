// The module _core; only cpp/bindings knows Python. Arrays cross as addresses: the callers in
// python/oasiskv/ops.py and engine/ check shapes and dtypes.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#ifdef OASIS_CUDA
#include "bindings/cuda.h"
#endif
#include "backend/cpu/memory.h"
#include "bindings/host.h"
#include "core.h"
#include "oasis/ops.h"
#include "oasis/philox.h"

namespace py = pybind11;
using namespace oasis;

namespace {

const float* in(uintptr_t p) { return reinterpret_cast<const float*>(p); }
float* out(uintptr_t p) { return reinterpret_cast<float*>(p); }

thread_local int g_threads = 1;  // of the engine that this thread drives

class PackedWeight {
 public:
  PackedWeight(uintptr_t weight, int64_t n, int64_t k)
      : n(n), k(k), data_(packed_floats(n, k), "packed weight") {
    if (n < 1 || k < 1) throw std::invalid_argument("PackedWeight needs n >= 1 and k >= 1");
    cpu_ops().pack_weight(in(weight), n, k, data_.data());
  }
  const float* data() const { return data_.data(); }
  const int64_t n, k;

 private:
  cpu::Memory data_;
};

void linear(uintptr_t x, int64_t rows, const PackedWeight& w, uintptr_t bias, uintptr_t y) {
  thread_local std::vector<float> scratch;
  const size_t need = static_cast<size_t>(rows * w.k);
  if (scratch.size() < need) scratch.resize(need);
  cpu_ops().linear(in(x), rows, w.data(), w.n, w.k, in(bias), out(y), scratch.data(), g_threads);
}

py::list ids(const std::vector<LogicalBlock>& blocks) {
  py::list l;
  for (LogicalBlock b : blocks) l.append(b.value);
  return l;
}

py::dict trace_dict(const TraceRecord& r) {
  py::list admitted;
  for (const Admission& a : r.selection.admitted)
    admitted.append(py::make_tuple(a.block.value, a.slot.value, a.evicted.value));
  py::dict d;
  d["step"] = r.step;
  d["id"] = r.id;
  d["layer"] = r.layer;
  d["head"] = r.head;
  d["first"] = r.first;
  d["predicted"] = ids(r.selection.predicted);
  d["admitted"] = admitted;
  d["capped"] = r.selection.capped;
  d["fill"] =
      r.filled ? py::object(py::make_tuple(r.fill_slot.value, r.fill_evicted.value)) : py::none();
  d["map"] = ids(r.map);
  d["last_selected"] = r.last_selected;
  return d;
}

// 16 bytes a name.
std::vector<BlockName> block_names(const py::bytes& names) {
  const auto bytes = static_cast<std::string_view>(names);
  constexpr size_t kBytes = sizeof(BlockName);
  if (bytes.size() % kBytes != 0)
    throw std::invalid_argument("names of " + std::to_string(bytes.size()) +
                                " bytes: must be 16 bytes each");
  std::vector<BlockName> all(bytes.size() / kBytes);
  std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}

py::dict stats_dict(const RequestStats& stats) {
  using namespace py::literals;
  const SequenceStats& s = stats.sequence;
  const LookaheadStats& l = stats.lookahead;
  return py::dict("dense_steps"_a = s.dense_steps, "sparse_steps"_a = s.sparse_steps,
                  "blocks_predicted"_a = l.predicted, "blocks_admitted"_a = l.admitted,
                  "blocks_capped"_a = l.capped, "bytes_fetched"_a = l.bytes_fetched,
                  "resident_tokens_max"_a = s.resident_tokens_max, "preemptions"_a = s.preemptions,
                  "stall_ms"_a = l.stall_ms, "kv_blocks_total"_a = s.kv_blocks,
                  "kv_blocks_new"_a = s.kv_blocks - s.kv_blocks_reused,
                  "kv_blocks_reused"_a = s.kv_blocks_reused);
}

py::dict usage_dict(const Usage& u) {
  using namespace py::literals;
  return py::dict("device_pages"_a = u.device_pages, "device_pages_free"_a = u.device_pages_free,
                  "host_blocks"_a = u.host_blocks, "host_blocks_free"_a = u.host_blocks_free,
                  "summary_pages"_a = u.summary_pages,
                  "summary_pages_free"_a = u.summary_pages_free, "waiting"_a = u.waiting,
                  "prefilling"_a = u.prefilling, "decoding"_a = u.decoding,
                  "preempted"_a = u.preempted, "prefix_blocks_cached"_a = u.prefix_blocks_cached,
                  "prefix_blocks_reused"_a = u.prefix_blocks_reused,
                  "prefix_blocks_evicted"_a = u.prefix_blocks_evicted);
}

const char* kind_name(RowKind k) {
  return k == RowKind::kPrefill ? "prefill" : k == RowKind::kDense ? "dense" : "sparse";
}

// Parts of the plan, which lives as long as one of them.
std::vector<std::shared_ptr<RowGroup>> plan_groups(Core& core,
                                                   const std::map<RequestId, int>& drafts) {
  const auto plan = std::const_pointer_cast<StepPlan>(core.plan(drafts));
  std::vector<std::shared_ptr<RowGroup>> groups;
  if (plan)
    for (RowGroup& g : plan->groups) groups.emplace_back(plan, &g);
  return groups;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "OasisKV core: KV pools, lookahead selection, transfers, attention, scheduling";
  py::register_exception<CapacityError>(m, "CapacityError", PyExc_ValueError);
  using nogil = py::call_guard<py::gil_scoped_release>;

  m.def("isa", [] { return cpu_ops().isa; });
  m.def("set_num_threads", [](int n) {
    if (n < 1) throw std::invalid_argument("num_threads must be at least 1");
    g_threads = n;
  });
  m.def("philox_uniform", &philox_uniform, py::arg("key"), py::arg("counter"));
  py::class_<PackedWeight>(m, "PackedWeight")
      .def(py::init<uintptr_t, int64_t, int64_t>(), py::arg("weight"), py::arg("n"), py::arg("k"))
      .def_readonly("n", &PackedWeight::n)
      .def_readonly("k", &PackedWeight::k);
  m.def("linear", &linear, nogil());
  m.def(
      "rms_norm",
      [](uintptr_t x, int64_t rows, int64_t dim, uintptr_t w, float eps, uintptr_t y) {
        cpu_ops().rms_norm(in(x), rows, dim, in(w), eps, out(y), g_threads);
      },
      nogil());
  m.def(
      "silu_mul",
      [](uintptr_t x, int64_t rows, int64_t inter, uintptr_t y) {
        cpu_ops().silu_mul(in(x), rows, inter, out(y), g_threads);
      },
      nogil());

  bind_host(m);
#ifdef OASIS_CUDA
  py::module_ cuda = m.def_submodule("cuda", "The CUDA kernels one by one");
  bind_cuda(cuda);
#endif

  py::class_<GatherShare>(m, "GatherShare")
      .def(py::init<int64_t, int, int, int>(), py::arg("link_bytes"), py::arg("ctas"),
           py::arg("in_flight") = 8, py::arg("foreground_sms") = 0)
      .def_readonly("link_bytes", &GatherShare::link_bytes)
      .def_readonly("ctas", &GatherShare::ctas)
      .def_readonly("in_flight", &GatherShare::in_flight)
      .def_readonly("foreground_sms", &GatherShare::foreground_sms);
  py::class_<CoreConfig>(m, "CoreConfig")
      .def(py::init<>())
      .def_readwrite("backend", &CoreConfig::backend)
      .def_readwrite("dtype", &CoreConfig::dtype)
      .def_readwrite("num_layers", &CoreConfig::num_layers)
      .def_readwrite("num_q_heads", &CoreConfig::num_q_heads)
      .def_readwrite("num_kv_heads", &CoreConfig::num_kv_heads)
      .def_readwrite("head_dim", &CoreConfig::head_dim)
      .def_readwrite("sparse_enabled", &CoreConfig::sparse_enabled)
      .def_readwrite("top_k_blocks", &CoreConfig::top_k_blocks)
      .def_readwrite("fetch_cap_blocks", &CoreConfig::fetch_cap_blocks)
      .def_readwrite("sink_blocks", &CoreConfig::sink_blocks)
      .def_readwrite("sparse_from_tokens", &CoreConfig::sparse_from_tokens)
      .def_readwrite("max_draft_len", &CoreConfig::max_draft_len)
      .def_readwrite("accept_drafts", &CoreConfig::accept_drafts)
      .def_readwrite("summary", &CoreConfig::summary)
      .def_readwrite("group_combine", &CoreConfig::group_combine)
      .def_readwrite("device_pages", &CoreConfig::device_pages)
      .def_readwrite("host_blocks", &CoreConfig::host_blocks)
      .def_readwrite("summary_pages", &CoreConfig::summary_pages)
      .def_readwrite("max_batch_size", &CoreConfig::max_batch_size)
      .def_readwrite("max_num_tokens", &CoreConfig::max_num_tokens)
      .def_readwrite("max_seq_len", &CoreConfig::max_seq_len)
      .def_readwrite("num_threads", &CoreConfig::num_threads)
      .def_readwrite("qk_norms", &CoreConfig::qk_norms)
      .def_readwrite("norm_eps", &CoreConfig::norm_eps)
      .def_readwrite("captured_sizes", &CoreConfig::captured_sizes)
      .def_readwrite("gather_shares", &CoreConfig::gather_shares)
      .def_readwrite("host_assume_bytes", &CoreConfig::host_assume_bytes)
      .def_readwrite("host_progress", &CoreConfig::host_progress)
      .def_readwrite("trace", &CoreConfig::trace)
      .def_readwrite("transfer_delay_us", &CoreConfig::transfer_delay_us)
      .def_readwrite("fault_seed", &CoreConfig::fault_seed)
      .def_property_readonly("summary_bytes",
                             [](const CoreConfig& c) {  // of the whole pool
                               return c.summary_pages_needed() * c.summary_page_elements() *
                                      element_bytes(dtype_from(c.dtype)) * c.num_layers;
                             })
      .def_property_readonly("page_bytes", [](const CoreConfig& c) { return c.page_bytes(); });

  py::class_<RowGroup, std::shared_ptr<RowGroup>>(m, "RowGroup")
      .def_readonly("id", &RowGroup::id)
      .def_property_readonly("table_row", [](const RowGroup& g) { return g.seq->row().value; })
      .def_property_readonly("kind", [](const RowGroup& g) { return kind_name(g.kind); })
      .def_readonly("start", &RowGroup::start)
      .def_readonly("rows", &RowGroup::rows)
      .def_readonly("drafts", &RowGroup::drafts)
      .def_readonly("logits_rows", &RowGroup::logits_rows);

  py::class_<Core> core(m, "Core");
#ifdef OASIS_CUDA
  bind_cuda_core(m, core);
#endif
  core.def(py::init([](const CoreConfig& c, uintptr_t cos, uintptr_t sin) {
        return std::make_unique<Core>(c, in(cos), in(sin));
      }))
      .def("check", &Core::check)
      .def(
          "submit",
          [](Core& c, RequestId id, int64_t prompt_tokens, int64_t max_new_tokens,
             const py::bytes& names) {
            c.submit(id, prompt_tokens, max_new_tokens, block_names(names));
          },
          py::arg("id"), py::arg("prompt_tokens"), py::arg("max_new_tokens"),
          py::arg("names") = py::bytes())
      .def(
          "end",
          [](Core& c, RequestId id, const py::bytes& names) {
            std::vector<BlockName> all = block_names(names);
            py::gil_scoped_release release;
            return c.end(id, std::move(all));
          },
          py::arg("id"), py::arg("names") = py::bytes())
      .def("forget", &Core::forget)
      .def("begin_step", &Core::begin_step, nogil())
      .def("plan", &plan_groups, nogil())
      .def(
          "forward",
          [](Core& c, int layer, uintptr_t qkv, uintptr_t y) {
            c.forward(layer, reinterpret_cast<const void*>(qkv), reinterpret_cast<void*>(y));
          },
          nogil())
      .def("commit", &Core::commit)
      .def("abort_step", &Core::abort_step, nogil())
      .def("drain", &Core::drain, nogil())
      .def(
          "stats",
          [](Core& c, RequestId id, int64_t step) {
            RequestStats s;
            {
              py::gil_scoped_release release;
              s = c.stats(id, step);
            }
            return stats_dict(s);
          },
          py::arg("id"), py::arg("step") = 0)
      .def_property_readonly("last_step", &Core::last_step)
      .def("usage", [](Core& c) { return usage_dict(c.usage()); })
      .def("take_trace", [](Core& c) {
        std::vector<TraceRecord> records;
        {
          py::gil_scoped_release release;
          c.drain();
          records = c.take_trace();
        }
        py::list l;
        for (const TraceRecord& r : records) l.append(trace_dict(r));
        return l;
      });
}
