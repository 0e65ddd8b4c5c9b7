// A NaN in one query head or draft row ranks the blocks the same wherever it stands: all scores are
// NaN, so the lower block first. A draft row that is NaN all over does not reach the normal row's
// output.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core.h"

using namespace oasis;

namespace {

constexpr int kGroup = 3, kDim = 64, kPrompt = 20 * kBlockTokens, kRow = (kGroup + 2) * kDim;

std::vector<float> rows(int count) {
  std::vector<float> qkv(static_cast<size_t>(count) * kRow);
  for (size_t i = 0; i < qkv.size(); ++i)
    qkv[i] = static_cast<float>(static_cast<int>((i * 2654435761u) % 17) - 8);
  return qkv;
}

struct Outcome {
  std::vector<LogicalBlock> first_choice;
  std::vector<float> normal_row;
};

// What comes of a first selection when the query of `head` in draft row `row` is NaN, or for head
// kAll the whole row; none is for row < 0.
constexpr int kAll = -1;
Outcome run(const std::string& combine, int row, int head) {
  CoreConfig c;
  c.num_layers = c.num_kv_heads = 1;
  c.num_q_heads = kGroup;
  c.head_dim = kDim;
  c.top_k_blocks = 4;
  c.fetch_cap_blocks = 1;
  c.sparse_from_tokens = 64;
  c.max_draft_len = 2;
  c.group_combine = combine;
  c.device_pages = c.host_blocks = 64;
  c.max_batch_size = 1;
  c.max_num_tokens = kPrompt;
  c.max_seq_len = kPrompt + 16;
  c.trace = true;
  std::vector<float> cos(c.max_seq_len * kDim / 2, 1.0f), sin(c.max_seq_len * kDim / 2, 0.0f);
  Core core(c, cos.data(), sin.data());
  core.submit(1, kPrompt, 8);
  std::vector<float> out(kPrompt * kGroup * kDim);
  core.begin_step();
  core.plan({});
  core.forward(0, rows(kPrompt).data(), out.data());
  core.commit({{1, 1}});
  core.begin_step();
  core.plan({{1, 2}});
  std::vector<float> qkv = rows(3);
  const int from = head == kAll ? 0 : head * kDim, floats = head == kAll ? kRow : kDim;
  if (row >= 0) std::fill_n(qkv.begin() + (1 + row) * kRow + from, floats, std::nanf(""));
  core.forward(0, qkv.data(), out.data());
  core.commit({{1, 1}});
  core.drain();
  for (const TraceRecord& r : core.take_trace())
    if (r.first) return {r.selection.predicted, {out.begin(), out.begin() + kGroup * kDim}};
  return {};
}

}  // namespace

int main() {
  const std::vector<LogicalBlock> ascending = {LogicalBlock(0), LogicalBlock(1), LogicalBlock(2),
                                               LogicalBlock(3)};
  for (const char* combine : {"max", "sum", "softmax_sum"}) {
    const Outcome clean = run(combine, -1, 0);
    if (clean.first_choice == ascending) {
      std::fprintf(stderr, "nan_rows: %s: the clean choice must differ from the lowest blocks\n",
                   combine);
      return 1;
    }
    for (int row = 0; row < 2; ++row) {
      if (run(combine, row, kAll).normal_row != clean.normal_row) {
        std::fprintf(stderr, "nan_rows: %s: draft row %d changed the normal row\n", combine, row);
        return 1;
      }
      for (int head = 0; head < kGroup; ++head)
        if (run(combine, row, head).first_choice != ascending) {
          std::fprintf(stderr, "nan_rows: %s: row %d, head %d changed the order\n", combine, row,
                       head);
          return 1;
        }
    }
  }
  std::printf("ok\n");
  return 0;
}
