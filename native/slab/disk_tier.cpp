#include "slab/disk_tier.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace dfkv {

namespace {

constexpr std::chrono::milliseconds kKeep(100);  // how often namespaces are saved and slots swept

}  // namespace

// One thread that makes things last. What waits is done together: one sync serves all of it.
class DiskTier::Keeper {
 public:
  struct Job {
    SlabStore::Removal removal;
    bool payload = false;
    Done done;
    int error = 0;
  };

  Keeper(SlabStore& store, const std::string& name) : store_(store), thread_([this] { run(); }) {
    name_thread(thread_, name);
  }
  ~Keeper() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  void post(Job job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }
  void quarantine(const ObjectKey& key) {
    {
      const std::lock_guard lock(mutex_);
      corrupt_.push_back(key);
    }
    changed_.notify_one();
  }

 private:
  void run() {
    // Kept from turn to turn, as those that they are swapped with, so that none of them allocates.
    std::vector<Job> jobs;
    std::vector<ObjectKey> corrupt;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait_for(lock, kKeep, [this] { return ending_ || !jobs_.empty() || !corrupt_.empty(); });
      const bool last = ending_ && jobs_.empty() && corrupt_.empty();
      jobs.swap(jobs_);
      corrupt.swap(corrupt_);
      lock.unlock();
      for (const ObjectKey& key : corrupt) store_.quarantine(key);
      corrupt.clear();
      serve(jobs);
      jobs.clear();
      static_cast<void>(store_.save_namespaces());
      static_cast<void>(store_.sweep());
      if (last) return;
      lock.lock();
    }
  }

  void serve(std::vector<Job>& jobs) {
    if (jobs.empty()) return;
    bool payload = false;
    for (Job& job : jobs) {
      job.error = store_.finish(job.removal);
      payload = payload || job.payload;
    }
    const int error = store_.sync(payload);
    for (const Job& job : jobs) job.done(job.error != 0 ? job.error : error);
  }

  SlabStore& store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Job> jobs_;
  std::vector<ObjectKey> corrupt_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses all of the above
};

struct DiskTier::Threads {
  Keeper keeper;
  std::unique_ptr<WorkerPool> readers;
  std::unique_ptr<WorkerPool> writers;

  Threads(SlabStore& store, const std::string& number, const DiskTierOptions& options)
      : keeper(store, "dfkv-keep-" + number),
        readers(std::make_unique<WorkerPool>("dfkv-read-" + number, options.readers)),
        writers(std::make_unique<WorkerPool>("dfkv-write-" + number, options.writers)) {}
};

DiskTier::DiskTier(DiskTierOptions options) : stores_(options.directories.size()) {
  std::vector<std::exception_ptr> failures(stores_.size());
  {
    std::vector<std::thread> openers;
    for (std::size_t i = 0; i < stores_.size(); ++i) {
      openers.emplace_back([this, &options, &failures, i] {
        try {
          stores_[i] = std::make_unique<SlabStore>(std::move(options.directories[i]));
        } catch (...) {
          failures[i] = std::current_exception();
        }
      });
    }
    for (std::thread& opener : openers) opener.join();
  }
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  for (std::size_t i = 0; i < stores_.size(); ++i) {
    threads_.push_back(std::make_unique<Threads>(*stores_[i], std::to_string(i), options));
  }
  // Every directory knows every namespace: an object may go to any of them.
  for (const auto& from : stores_) {
    for (const NamespaceInfo& info : from->namespaces()) put_namespace(info);
  }
}

DiskTier::~DiskTier() { stop(); }

void DiskTier::stop() {
  // Readers and writers give work to the keepers of every directory, and end first.
  for (const auto& threads : threads_) {
    threads->readers.reset();
    threads->writers.reset();
  }
  threads_.clear();
  for (const auto& store : stores_) store->close();
}

bool DiskTier::holds(const ObjectKey& key) const {
  return std::ranges::any_of(stores_, [&key](const auto& store) { return store->holds(key); });
}

bool DiskTier::evicted_lately(const ChunkKey& key) const {
  return std::ranges::any_of(stores_, [&key](const auto& store) { return store->evicted_lately(key); });
}

std::optional<DiskTier::Ref> DiskTier::pin(const ObjectKey& key) {
  for (std::uint32_t i = 0; i < stores_.size(); ++i) {
    if (const auto slot = stores_[i]->pin(key)) return Ref{i, *slot};
  }
  return std::nullopt;
}

std::optional<DiskTier::Ref> DiskTier::pin_for_lease(const ObjectKey& key) {
  for (std::uint32_t i = 0; i < stores_.size(); ++i) {
    if (const auto slot = stores_[i]->pin_for_lease(key)) return Ref{i, *slot};
  }
  return std::nullopt;
}

void DiskTier::touch(const NamespaceId& ns, std::span<const BlockId> batch) {
  for (const auto& store : stores_) store->touch(ns, batch);
}

void DiskTier::put_namespace(const NamespaceInfo& info) {
  for (const auto& store : stores_) store->put_namespace(info);
}

std::uint64_t DiskTier::erase(const NamespaceId& ns) {
  std::uint64_t objects = 0;
  for (const auto& store : stores_) objects += store->erase(ns);
  return objects;
}

// Parts of one chunk go together as long as its directory takes them.
std::optional<std::uint32_t> DiskTier::choose(const ChunkKey& key, std::uint64_t length) const {
  return best_of(key, [length](const SlabStore& store) { return store.writable() && store.fits(length); });
}

std::optional<std::uint32_t> DiskTier::best_of(const ChunkKey& key,
                                               const std::function<bool(const SlabStore&)>& fit) const {
  std::optional<std::uint32_t> best;
  double best_score = 0;
  const auto hash =
      load_le<std::uint64_t>(key.block.bytes.data()) ^ load_le<std::uint64_t>(key.ns.bytes.data());
  for (std::uint32_t i = 0; i < stores_.size(); ++i) {
    if (!fit(*stores_[i])) continue;
    // Weighted by capacity; the multiplication spreads what a block id has in its low bits.
    const std::uint64_t mixed = (hash ^ (i + 1) * 0x9E3779B97F4A7C15U) * 0xD1342543DE82EF95U;
    const double score = static_cast<double>(mixed >> 11) * static_cast<double>(stores_[i]->capacity_bytes());
    if (!best || score > best_score) {
      best = i;
      best_score = score;
    }
  }
  return best;
}

bool DiskTier::begin_remove(const ObjectKey& key, Removals& out) {
  out.by_directory.resize(stores_.size());
  out.concerned.resize(stores_.size());
  if (const auto home = best_of({key.ns, key.block}, [](const SlabStore&) { return true; })) {
    out.concerned[*home] = true;
  }
  bool found = false;
  for (std::size_t i = 0; i < stores_.size(); ++i) {
    auto removal = stores_[i]->begin_remove(key);
    auto& all = out.by_directory[i];
    found = found || !removal.slots.empty();
    all.slots.insert(all.slots.end(), removal.slots.begin(), removal.slots.end());
    all.writes.insert(all.writes.end(), removal.writes.begin(), removal.writes.end());
  }
  return found;
}

bool DiskTier::unwritable() const {
  return std::ranges::none_of(stores_, [](const auto& store) { return store->writable(); });
}

void DiskTier::read(std::uint32_t directory, WorkerPool::Task task) {
  threads_[directory]->readers->post(std::move(task));
}

void DiskTier::write(std::uint32_t directory, WorkerPool::Task task) {
  threads_[directory]->writers->post(std::move(task));
}

void DiskTier::quarantine(const ObjectKey& key) {
  for (const auto& threads : threads_) threads->keeper.quarantine(key);
}

void DiskTier::settle(Removals removals, bool payload, Done done) {
  struct Gather {
    std::atomic<std::size_t> left;
    std::atomic<int> error{0};
    Done done;
  };
  removals.by_directory.resize(stores_.size());
  // An earlier copy may have been evicted a moment ago, from where its chunk belongs or from where it went
  // while that directory was failing. One that fails and has nothing to do with the keys is left out.
  RecycledVector<std::size_t> concerned;
  for (std::size_t i = 0; i < stores_.size(); ++i) {
    if (removals.concerned.empty() || removals.concerned[i] || !removals.by_directory[i].empty() ||
        stores_[i]->stats().state == DiskState::kOk) {
      concerned.push_back(i);
    }
  }
  const auto gather = recycled_shared<Gather>();
  gather->left = concerned.size();
  gather->done = std::move(done);
  if (concerned.empty()) gather->done(0);
  for (const std::size_t i : concerned) {
    threads_[i]->keeper.post({std::move(removals.by_directory[i]), payload,
                              [gather](int error) {
                                if (error != 0) gather->error = error;
                                if (--gather->left == 0) gather->done(gather->error);
                              },
                              0});
  }
}

void DiskTier::sync(std::uint32_t directory, Done done) {
  threads_[directory]->keeper.post({{}, true, std::move(done), 0});
}

void DiskTier::add_stats(DiskStats& out) const {
  out.directories = stores_.size();
  for (const auto& store : stores_) {
    const SlabStats one = store->stats();
    if (one.state != DiskState::kOk) ++out.directories_failing;
    out.capacity_bytes += one.capacity_bytes;
    out.used_bytes += one.used_bytes;
    out.quarantined_bytes += one.quarantined_bytes;
    out.bound_bytes += one.bound_bytes;
    out.objects += one.objects;
    out.quarantined += one.quarantined;
    out.pins += one.pins;
    out.leased_bytes += one.leased_bytes;
    out.reads += one.reads;
    out.writes += one.writes;
    out.read_bytes += one.read_bytes;
    out.written_bytes += one.written_bytes;
    out.read_errors += one.read_errors;
    out.write_errors += one.write_errors;
    out.corrupt += one.corrupt;
    out.evicted_objects += one.evicted_objects;
    out.evicted_bytes += one.evicted_bytes;
  }
}

}  // namespace dfkv
