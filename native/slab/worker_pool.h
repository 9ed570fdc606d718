// Threads that run tasks in the order given.
#pragma once

#include <semaphore.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "slab/callback.h"
#include "slab/recycled.h"

namespace dfkv {

class WorkerPool {
 public:
  using Task = Callback<void()>;
  WorkerPool(const std::string& name, unsigned threads);
  ~WorkerPool();  // runs what is queued, then ends
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;
  void post(Task task);

 private:
  // Not a condition variable: with several threads waiting, glibc's before 2.41 loses a wakeup now and then
  // (its bug 25847), and a task would lie until the next comes.
  class Semaphore {
   public:
    Semaphore() { ::sem_init(&semaphore_, 0, 0); }
    ~Semaphore() { ::sem_destroy(&semaphore_); }
    Semaphore(const Semaphore&) = delete;
    Semaphore& operator=(const Semaphore&) = delete;
    void release() { ::sem_post(&semaphore_); }
    void acquire() {
      while (::sem_wait(&semaphore_) != 0) {  // interrupted
      }
    }

   private:
    ::sem_t semaphore_;
  };

  void run();

  std::mutex mutex_;
  RecycledDeque<Task> tasks_;
  Semaphore wakeups_;  // one for each task, and at the end one for each thread
  std::vector<std::thread> threads_;
};

void name_thread(std::thread& thread, const std::string& name);

}  // namespace dfkv
