#include "slab/worker_pool.h"

#include <pthread.h>

#include <utility>

namespace dfkv {

void name_thread(std::thread& thread, const std::string& name) {
  ::pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
}

WorkerPool::WorkerPool(const std::string& name, unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { run(); });
    name_thread(threads_.back(), name);
  }
}

WorkerPool::~WorkerPool() {
  for (std::size_t i = 0; i < threads_.size(); ++i) wakeups_.release();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::post(Task task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wakeups_.release();
}

void WorkerPool::run() {
  while (true) {
    wakeups_.acquire();
    Task task;
    {
      const std::lock_guard lock(mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace dfkv
