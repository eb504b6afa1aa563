// Answers the k-th request for memory of the op that runs with its planned address. No torch, no Python: the allocators of all
// devices share this and only add where memory comes from.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plan.hpp"
#include "recording.hpp"
#include "slots.hpp"

namespace olla::replay {

inline constexpr std::int64_t kMaxSkipped = 1000;  // planned requests that a sequence may leave out at once

// The call does not fit the state: a window inside a window, a second table, another thread.
struct StateError : std::logic_error {
  using std::logic_error::logic_error;
};

// Windows, tables and arenas of a process. A thread records, or runs at planned addresses, or does neither; inside a window its
// requests are recorded or answered from its arena. Blocks may be freed at any time on any thread. O(log blocks) per call.
class Memory {
 public:
  struct Source {
    Bytes alignment;                   // of every block
    std::function<void*(Bytes)> take;  // memory of an arena, from the default allocator
    std::function<void(void*)> give;   // back to it
    // Device and queue of this thread's work: an arena serves the place it was taken for.
    std::function<std::int64_t()> place = [] { return std::int64_t{0}; };
  };

  explicit Memory(Source source) : source_(std::move(source)) {}

  // Whether a window is open for this thread: its own, or one shared with all threads.
  static bool inside() { return session_ != nullptr ? session_->op != kNoOp : shared_window_ != Window::kClosed; }
  static bool recording() {
    return session_ != nullptr ? session_->op != kNoOp && session_->recording : shared_window_ == Window::kRecords;
  }

  void begin(OpId op) {
    if (session_ == nullptr) throw StateError("begin: this thread neither records nor has an active table");
    Session& s = *session_;
    const auto lock = lock_for(s);
    if (s.op != kNoOp) throw StateError("begin(" + std::to_string(op) + "): op " + std::to_string(s.op) + " has not ended");
    if (op < 0 || op >= s.num_ops)
      throw StateError("begin: op is " + std::to_string(op) + ", expected 0 to " + std::to_string(s.num_ops - 1));
    s.op = op;
    s.index = 0;
    if (s.recording) {
      s.recorded.start_op(op);
    } else {
      s.next = s.plan.first[op];
      s.missed = 0;
    }
    if (s.shared) shared_window_ = s.recording ? Window::kRecords : Window::kPlanned;
  }

  // Also where no window is open: it can stand in every `finally`.
  void end() {
    if (session_ == nullptr) return;
    const auto lock = lock_for(*session_);
    close(*session_);
  }

  // A shared recording or table takes the requests of all threads that have none of their own.
  void start_recording(OpId num_ops, bool shared = false) {
    if (num_ops < 0) throw StateError("start_recording: num_ops is " + std::to_string(num_ops) + ", expected 0 or more");
    Session& s = open("start_recording", shared);
    s.recording = true;
    s.num_ops = num_ops;
    const std::lock_guard lock(mutex_);
    recordings_.push_back(&s.recorded);
  }

  std::vector<Recording::Allocation> stop_recording() {
    if (session_ == nullptr || !session_->recording) throw StateError("stop_recording: this thread does not record");
    const std::lock_guard lock(mutex_);
    const std::unique_ptr<Session> s = leave();
    std::erase(recordings_, &s->recorded);
    return s->recorded.take();
  }

  // The recording so far, which goes on.
  std::vector<Recording::Allocation> recorded() {
    if (session_ == nullptr || !session_->recording) throw StateError("recorded: this thread does not record");
    const std::lock_guard lock(mutex_);
    return session_->recorded.allocations();
  }

  // Throws what the source of memory throws when there is no room for the arena.
  void activate(Plan plan, bool shared = false) {
    plan.check(source_.alignment);
    Session& s = open("activate", shared);
    try {
      s.arena = find_arena(plan.arena_bytes);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      leave();
      throw;
    }
    s.num_ops = plan.num_ops();
    s.plan = std::move(plan);
    const std::lock_guard lock(mutex_);
    s.counters.peak_bytes = s.arena->slots.used_bytes();
  }

  // The arena goes back when its last block is freed; a kept one stays for the next table that fits in, until release().
  Counters deactivate(bool keep) {
    if (session_ == nullptr || session_->recording) throw StateError("deactivate: this thread has no active table");
    std::unique_lock lock(mutex_);
    const std::unique_ptr<Session> s = leave();
    s->arena->state = keep ? Arena::kKept : Arena::kRetired;
    give_back(lock);
    return std::move(s->counters);
  }

  // Ends what an interrupted call left open on this thread, if anything. What is shared with all threads was opened on purpose.
  void abandon() {
    if (session_ != nullptr && !session_->shared) quit(true);
  }

  // Around a fork: a child whose parent held the lock in another thread would wait for it for ever.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  void release() {
    std::unique_lock lock(mutex_);
    for (auto& [base, arena] : arenas_)
      if (arena.state == Arena::kKept) arena.state = Arena::kRetired;
    give_back(lock);
  }

  // The planned address of a request of the window that is open for this thread, or nullptr: the default allocator answers.
  void* planned(Bytes bytes) {
    const std::lock_guard lock(mutex_);
    Session* const found = current();
    if (found == nullptr || found->op == kNoOp || found->recording) return nullptr;
    Session& s = *found;
    const std::int32_t index = s.index++;
    s.counters.requested_bytes += bytes;
    const std::int64_t last = s.plan.first[s.op + 1];
    const std::int64_t k = s.plan.in_sequence ? s.find_in_sequence(bytes, last) : s.find(bytes, last);
    if (k == last) return miss(s, index, bytes, s.next == last ? "unplanned" : "size");
    s.next = k + 1;
    const Offset offset = s.plan.offset[k];
    if (offset == kNotInArena) return nullptr;
    const Bytes charge = (bytes + s.plan.alignment - 1) / s.plan.alignment * s.plan.alignment;
    if (!s.arena->slots.take(offset, bytes, charge)) return miss(s, index, bytes, "occupied");
    s.counters.peak_bytes = std::max(s.counters.peak_bytes, s.arena->slots.used_bytes());
    s.counters.high_water_bytes = std::max(s.counters.high_water_bytes, offset + charge);
    ++s.counters.num_hits;
    s.counters.hit_bytes += bytes;
    return s.arena->base + offset;
  }

  // Counts a request that must not be answered from the arena: nullptr.
  void* refuse(Bytes bytes, const char* reason) {
    const std::lock_guard lock(mutex_);
    Session* const s = current();
    if (s == nullptr) return nullptr;
    s->counters.requested_bytes += bytes;
    return miss(*s, s->index++, bytes, reason);
  }

  // What the default allocator gave to the window; nullptr where its end cannot be seen.
  void record(const void* block, Bytes bytes) {
    const std::lock_guard lock(mutex_);
    Session* const s = current();
    if (s != nullptr && s->op != kNoOp && s->recording) s->recorded.allocated(block, s->op, s->index++, bytes);
  }

  // False: the block is the default allocator's and the caller frees it there.
  bool freed(void* block) {
    std::unique_lock lock(mutex_);
    if (Arena* arena = arena_of(block)) {
      arena->slots.give(static_cast<char*>(block) - arena->base);
      if (arena->state == Arena::kRetired && arena->slots.empty()) give_back(lock);
      return true;
    }
    for (Recording* recording : recordings_)
      if (recording->freed(block)) break;
    return false;
  }

  // Start and size of this thread's arena; nullptr and 0 without an active table.
  std::pair<void*, Bytes> arena() const {
    if (session_ == nullptr || session_->arena == nullptr) return {nullptr, 0};
    return {session_->arena->base, session_->arena->bytes};
  }

  // Start of the arena that holds a block, or nullptr.
  void* arena_base(const void* block) {
    const std::lock_guard lock(mutex_);
    const Arena* arena = arena_of(block);
    return arena == nullptr ? nullptr : arena->base;
  }

  // Whether this thread works where the arena was taken.
  bool at_place() {
    const std::int64_t place = source_.place();
    const std::lock_guard lock(mutex_);
    const Session* const s = current();
    return s == nullptr || s->arena == nullptr || s->arena->place == place;
  }

  // Bytes of all arenas of the process: active, kept, and waiting for their last block.
  Bytes held_bytes() {
    const std::lock_guard lock(mutex_);
    Bytes sum = 0;
    for (const auto& [base, arena] : arenas_) sum += arena.bytes;
    return sum;
  }

 private:
  struct Arena {
    char* base;
    Bytes bytes;
    std::int64_t place;
    Slots slots;
    enum { kActive, kKept, kRetired } state = kActive;
  };

  // What a thread does between activate and deactivate, or while it records.
  struct Session {
    bool recording = false;
    bool shared = false;  // with all threads that have no session of their own
    OpId num_ops = 0;
    OpId op = kNoOp;         // whose window is open
    std::int32_t index = 0;  // of its next request
    std::int64_t next = 0;   // first planned request that has not been passed
    Plan plan;
    Arena* arena = nullptr;
    Bytes missed = 0;  // size of the request before, if it was not found in sequence
    Counters counters;
    Recording recorded;

    // A request more or less than planned must not shift all that follow: the next one of this size.
    std::int64_t find(Bytes bytes, std::int64_t last) const {
      std::int64_t k = next;
      while (k < last && plan.bytes[k] != bytes) ++k;
      return k;
    }

    // In a long window the next one of this size may lie far ahead, and going there would pass all between. So a request of another
    // size counts as one more than planned, unless the one after it shows where the sequence goes on: two sizes in a row.
    std::int64_t find_in_sequence(Bytes bytes, std::int64_t last) {
      const Bytes before = std::exchange(missed, 0);
      if (next < last && plan.bytes[next] == bytes) return next;
      if (before != 0) {
        const std::int64_t end = std::min(last, next + kMaxSkipped);
        for (std::int64_t k = next + 1; k < end; ++k)
          if (plan.bytes[k] == bytes && plan.bytes[k - 1] == before) return k;
      }
      missed = bytes;
      return last;
    }
  };

  void quit(bool keep) {
    if (session_->recording)
      stop_recording();
    else
      deactivate(keep);
  }

  // A thread that ends in the middle leaves nothing behind.
  struct AtThreadExit {
    Memory* memory;
    ~AtThreadExit() {
      if (session_ != nullptr) memory->quit(false);
    }
  };

  Session& open(const char* call, bool shared) {
    if (session_ != nullptr)
      throw StateError(std::string(call) + ": this thread already " + (session_->recording ? "records" : "has an active table"));
    const std::lock_guard lock(mutex_);
    if (shared && shared_ != nullptr)
      throw StateError(std::string(call) + ": another thread's recording or table is shared with all threads");
    at_thread_exit_.memory = this;
    session_ = new Session;
    session_->shared = shared;
    if (shared) shared_ = session_;
    return *session_;
  }

  // The windows of a session of one thread need no lock.
  std::unique_lock<std::mutex> lock_for(const Session& s) {
    return s.recording || s.shared ? std::unique_lock(mutex_) : std::unique_lock<std::mutex>();
  }

  // With the lock held, as the next two. A session that another thread shares may be gone a moment later.
  Session* current() const { return session_ != nullptr ? session_ : shared_; }

  void close(Session& s) {
    s.op = kNoOp;
    if (s.shared) shared_window_ = Window::kClosed;
  }

  std::unique_ptr<Session> leave() {
    close(*session_);
    if (session_->shared) shared_ = nullptr;
    return std::unique_ptr<Session>(std::exchange(session_, nullptr));
  }

  void* miss(Session& s, std::int32_t index, Bytes bytes, const char* reason) {
    ++s.counters.num_misses;
    s.counters.missed_bytes += bytes;
    if (s.counters.misses.size() < kMaxMisses) s.counters.misses.push_back({s.op, index, bytes, reason});
    return nullptr;
  }

  // A kept arena that is large enough, or a new one. Kept arenas that are too small go back first.
  Arena* find_arena(Bytes bytes) {
    const std::int64_t place = source_.place();
    std::unique_lock lock(mutex_);
    for (auto& [base, arena] : arenas_) {
      if (arena.state != Arena::kKept || arena.place != place) continue;
      arena.state = arena.bytes >= bytes ? Arena::kActive : Arena::kRetired;
      if (arena.state == Arena::kActive) return &arena;
    }
    give_back(lock);
    lock.unlock();  // the default allocator may call back into freed()
    const Bytes taken = std::max(bytes, source_.alignment);
    char* base = static_cast<char*>(source_.take(taken));
    lock.lock();
    return &arenas_.try_emplace(base, Arena{base, taken, place, {}}).first->second;
  }

  Arena* arena_of(const void* block) {
    auto arena = arenas_.upper_bound(static_cast<const char*>(block));
    if (arena == arenas_.begin()) return nullptr;
    --arena;
    return static_cast<const char*>(block) < arena->second.base + arena->second.bytes ? &arena->second : nullptr;
  }

  // Gives retired arenas without blocks back to the default allocator, outside the lock.
  void give_back(std::unique_lock<std::mutex>& lock) {
    std::vector<char*> bases;
    std::erase_if(arenas_, [&](const auto& entry) {
      const Arena& arena = entry.second;
      const bool done = arena.state == Arena::kRetired && arena.slots.empty();
      if (done) bases.push_back(arena.base);
      return done;
    });
    lock.unlock();
    for (char* base : bases) source_.give(base);
    lock.lock();
  }

  enum class Window { kClosed, kPlanned, kRecords };

  inline static thread_local Session* session_ = nullptr;
  inline static std::atomic<Window> shared_window_{Window::kClosed};  // of the shared session
  inline static thread_local AtThreadExit at_thread_exit_;

  Source source_;
  std::mutex mutex_;  // guards what other threads touch: arenas, slots, recordings, the shared session
  Session* shared_ = nullptr;
  std::map<const char*, Arena> arenas_;
  std::vector<Recording*> recordings_;
};

}  // namespace olla::replay
