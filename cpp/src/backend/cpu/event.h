// A step counter that threads can wait on. It only grows.
#pragma once

#include <condition_variable>
#include <mutex>

namespace oasis::cpu {

class StepEvent {
 public:
  void record(int64_t step) {
    {
      std::lock_guard lock(mutex_);
      if (step > step_) step_ = step;
    }
    changed_.notify_all();
  }

  void wait(int64_t step) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return step_ >= step; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t step_ = 0;
};

}  // namespace oasis::cpu
