// Serves the memory requests of the running op at their planned addresses. Independent of torch and Python: the allocators of all
// devices share it and only add the source of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arenas.hpp"
#include "session.hpp"
#include "windows.hpp"

namespace olla::replay {

// Windows, plans ("tables") and arenas of a process. A window is open while an op, or an iteration of a loop, runs on a thread:
// its requests are recorded, served from the arena, or both. A step inside a loop suspends the loop. Blocks may be freed at any
// time on any thread. O(log blocks) per call.
class Memory : public ThreadWindows {
 public:
  explicit Memory(Source source) : arenas_(std::move(source)) {}

  // Whether the open window belongs to another device than this thread's current one: requests then bypass it.
  bool elsewhere() const { return is_of_another(arenas_.device()); }

  void begin(OpId op) {
    if (session_ == nullptr) throw StateError("begin: this thread neither records nor has an active table");
    Session& s = *session_;
    const auto lock = lock_for(s);
    if (s.op != kNoOp) throw StateError("begin(" + std::to_string(op) + "): op " + std::to_string(s.op) + " has not ended");
    if (op < 0 || op >= s.num_ops)
      throw StateError("begin: op is " + std::to_string(op) + ", expected 0 to " + std::to_string(s.num_ops - 1));
    s.enter(op);
    show(s);
  }

  // Does nothing if no window is open.
  void end() {
    if (session_ == nullptr) return;
    const auto lock = lock_for(*session_);
    close(*session_);
  }

  // Also ends the table, if there is one: its arena is given back when its last block is freed.
  std::vector<Recording::Allocation> stop_recording() {
    if (session_ == nullptr || !session_->recording || session_->is_loop)
      throw StateError("stop_recording: this thread does not record");
    return quit(Arena::kRetired)->recorded.take();
  }

  // Throws the source's error if there is no room for the arena. A step that also records ends with stop_recording().
  void activate(Plan plan, bool recording = false) {
    plan.check(arenas_.alignment());
    Session& s = open("activate", {.recording = recording, .patience = patience_});
    try {
      const std::int64_t place = arenas_.place();
      std::unique_lock lock(mutex_);
      s.arena = arenas_.find(plan.arena_bytes, place, lock);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      leave();
      throw;
    }
    const std::lock_guard lock(mutex_);  // other threads may free blocks of a kept arena
    s.num_ops = plan.num_ops();
    s.plan = std::move(plan);
    s.counters.peak_bytes = s.counters.total_peak_bytes = s.arena->slots.used_bytes();
  }

  // The arena goes back when its last block is freed; a kept one stays for the next table that fits in, until release().
  Counters deactivate(bool keep) {
    if (session_ == nullptr || session_->recording) throw StateError("deactivate: this thread has no active table");
    const std::unique_ptr<Session> left = quit(keep ? Arena::kKept : Arena::kRetired);
    patience_ = left->patience > 0 ? kPatience : kLittlePatience;
    return std::move(left->counters);
  }

  // Begins a loop, whose iterations are recorded, and planned too once plan_loop() says how. Steps inside it suspend it. A shared
  // one takes the requests that all threads without a session of their own make on its device.
  void open_loop(bool shared) {
    open("open_loop", {.recording = true, .is_loop = true, .shared = shared, .num_ops = std::numeric_limits<OpId>::max()});
  }

  // Called between two windows. Blocks of the previous plan stay. If the arena must change size, the next request takes the new
  // one: in most loops, gradients and the like are freed by then. Without room for it, or with no_more if it would raise the peak
  // of reserved memory, the loop goes on without a plan, and loop_counters() throws the error.
  void plan_loop(Plan plan, bool no_more = false) {
    Session& s = loop("plan_loop");
    if (s.op != kNoOp) throw StateError("plan_loop: iteration " + std::to_string(s.op) + " has not ended");
    plan.check(arenas_.alignment());
    if (plan.held.empty()) throw std::invalid_argument("table: held is empty, expected an entry for each kind of iteration");
    std::unique_lock lock(mutex_);
    s.plan = {};
    const bool fits = s.arena != nullptr && s.arena->bytes == arenas_.taken_for(plan.arena_bytes);
    lock.unlock();
    if (!fits) unplan_loop();
    const std::int64_t place = arenas_.place();
    lock.lock();
    s.plan = std::move(plan);
    s.plan_number = ++num_loop_plans_;
    s.awaited = fits ? std::nullopt : std::optional(Awaited{place, no_more});
  }

  // Between two windows: the loop has no plan, and its arena goes back when its last block is freed.
  void unplan_loop() {
    Session& s = loop("unplan_loop");
    std::unique_lock lock(mutex_);
    s.plan = {};
    s.plan_number = 0;
    s.awaited.reset();
    if (s.arena != nullptr) std::exchange(s.arena, nullptr)->state = Arena::kRetired;
    arenas_.give_back(lock);
  }

  // Counters since the last call. Throws the source's error if there was no room for the arena.
  Counters loop_counters() {
    Session& s = loop("loop_counters");
    const std::lock_guard lock(mutex_);
    if (s.failure != nullptr) std::rethrow_exception(std::exchange(s.failure, nullptr));
    Counters counters = std::exchange(s.counters, {});
    if (s.arena != nullptr) s.counters.peak_bytes = s.arena->slots.used_bytes();
    return counters;
  }

  // The plan's row that the last iteration followed, and the blocks it found in the arena.
  std::pair<OpId, std::vector<Slots::Held>> loop_row() {
    const std::lock_guard lock(mutex_);
    const Session& s = loop("loop_row");
    return {s.row, s.held};
  }

  std::vector<Recording::Allocation> iteration(OpId number) {
    const std::lock_guard lock(mutex_);
    return loop("iteration").recorded.of(number);
  }
  void forget(OpId number) {
    const std::lock_guard lock(mutex_);
    loop("forget").recorded.forget(number);
  }

  // Ends this thread's loop and a step still open; does nothing without them.
  void close_loop() {
    abandon();
    if (session_ != nullptr) quit(Arena::kRetired);
  }

  // Ends the step that an interrupted call left open on this thread, if any. A loop goes on.
  void abandon() {
    if (session_ != nullptr && !session_->is_loop) quit(Arena::kKept);
  }

  // Held across fork(): else the child could inherit a mutex locked by another thread and wait for it forever.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // In the child of a fork, with the lock held: ends all sessions, so that it neither records nor uses planned addresses. Its
  // copies of arenas stay readable, and are given back when their last block is freed.
  void forked() {
    leave_all();
    recordings_.clear();
    arenas_.retire(Arena::kActive);
  }

  void release() {
    arenas_.poll();
    std::unique_lock lock(mutex_);
    arenas_.retire(Arena::kKept);
    arenas_.give_back(lock);
  }

  // The planned address of a request of the window that is open for this thread, or nullptr: the default allocator answers.
  void* planned(Bytes bytes) {
    std::unique_lock lock(mutex_);
    Session* const found = current();
    if (found == nullptr || found->op == kNoOp || found->plan.num_ops() < 1) return nullptr;
    if (found->arena == nullptr && !(found->awaited && take_awaited(found, lock))) return nullptr;
    Session& s = *found;
    s.counters.requested_bytes += bytes;
    const std::int64_t k = s.find(bytes);
    const std::int32_t index = s.index++;
    if (k == s.last()) return miss(s, index, bytes, s.next == k ? "unplanned" : "size");
    s.next = k + 1;
    const Offset offset = s.plan.offset[k];
    const Bytes charge = (bytes + s.plan.alignment - 1) / s.plan.alignment * s.plan.alignment;
    if (offset == kNotInArena) {
      if (!s.is_loop) s.outlasting += charge;
      count_peak(s);
      return nullptr;
    }
    if (!take(s, offset, bytes, charge, lock)) return miss(s, index, bytes, "occupied");
    count_peak(s);
    s.counters.high_water_bytes = std::max(s.counters.high_water_bytes, offset + charge);
    ++s.counters.num_hits;
    s.counters.hit_bytes += bytes;
    char* const block = s.arena->base + offset;
    if (s.recording) s.recorded.allocated(block, s.op, bytes);
    return block;
  }

  // Counts a request that must not be answered from the arena: nullptr.
  void* refuse(Bytes bytes, const char* reason) {
    const std::lock_guard lock(mutex_);
    Session* const s = current();
    if (s == nullptr || s->plan.num_ops() < 1) return nullptr;
    s->counters.requested_bytes += bytes;
    return miss(*s, s->index++, bytes, reason);
  }

  // Records a block of the default allocator; nullptr if its deleter could not be replaced, so that its free goes unseen.
  void record(const void* block, Bytes bytes) {
    const std::lock_guard lock(mutex_);
    Session* const s = current();
    if (s != nullptr && s->op != kNoOp && s->recording) s->recorded.allocated(block, s->op, bytes);
  }

  // Number of blocks in use that an op of this thread's step requested: recorded ones, or those in the arena.
  std::int64_t live(OpId op) {
    if (session_ == nullptr || session_->is_loop) return 0;
    const std::lock_guard lock(mutex_);
    if (session_->recording) return session_->recorded.live(op);
    return session_->arena == nullptr ? 0 : session_->arena->slots.taken_by(op);
  }

  // False: the block is the default allocator's and the caller frees it there.
  bool freed(void* block) {
    std::unique_lock lock(mutex_);
    for (Recording* recording : recordings_)
      if (recording->freed(block)) break;
    if (Arena* arena = arenas_.of(block)) {
      arena->slots.give(static_cast<char*>(block) - arena->base);
      if (arena->state == Arena::kRetired && arena->slots.empty()) arenas_.give_back(lock);
      return true;
    }
    return false;
  }

  // Start and size of this thread's arena; nullptr and 0 without an active table.
  std::pair<void*, Bytes> arena() const {
    const Arena* const own = session_ == nullptr ? nullptr : session_->arena;
    return own == nullptr ? std::pair<void*, Bytes>{} : std::pair<void*, Bytes>{own->base, own->bytes};
  }

  // First address of the arena that holds a block, and the place it was taken for; nullptr where none does.
  std::pair<void*, std::int64_t> arena_of(const void* block) {
    const std::lock_guard lock(mutex_);
    const Arena* arena = arenas_.of(block);
    return arena == nullptr ? std::pair<void*, std::int64_t>{} : std::pair<void*, std::int64_t>{arena->base, arena->place};
  }

  // Whether this thread works at the place (device and stream) of the arena.
  bool at_place() {
    const std::int64_t place = arenas_.place();
    const std::lock_guard lock(mutex_);
    const Session* const s = current();
    if (s == nullptr || s->awaited) return s == nullptr || s->awaited->place == place;
    return s->arena == nullptr || s->arena->place == place;
  }

  // Bytes of all arenas of the process: active, kept, and waiting for their last block.
  Bytes held_bytes() {
    const std::lock_guard lock(mutex_);
    return arenas_.held_bytes();
  }

 private:
  // Leaves the session of this thread; its arena is kept or retired.
  std::unique_ptr<Session> quit(decltype(Arena::state) state) {
    std::unique_lock lock(mutex_);
    std::unique_ptr<Session> s = leave();
    if (s->arena != nullptr) s->arena->state = state;
    arenas_.give_back(lock);
    return s;
  }

  // Ends the open sessions of a thread that exits.
  struct AtThreadExit {
    Memory* memory;
    ~AtThreadExit() {
      while (session_ != nullptr) memory->quit(Arena::kRetired);
    }
  };

  // A step may begin inside a loop; nothing else begins inside another.
  Session& open(const char* call, Session made) {
    const std::string refused = std::string(call) + ": this thread ";
    const std::size_t device = made.device = arenas_.device();
    if (session_ != nullptr && !session_->is_loop)
      throw StateError(refused + "already " + (session_->recording ? "records" : "has an active table"));
    if (session_ != nullptr && made.is_loop)
      throw StateError(refused + "already records in a pool: pools do not nest, leave the other one first");
    const std::lock_guard lock(mutex_);
    if (made.shared && shared_[device] != nullptr)
      throw StateError(std::string(call) + ": another thread's loop on this device is shared with all threads");
    at_thread_exit_.memory = this;
    made.outer = session_;
    session_ = new Session(std::move(made));
    if (session_->shared) shared_[device] = session_;
    if (session_->recording) recordings_.push_back(&session_->recorded);
    if (session_->outer != nullptr) hide(*session_->outer);  // suspended in all threads
    return *session_;
  }

  Session& loop(const char* call) {
    if (session_ == nullptr || !session_->is_loop) throw StateError(std::string(call) + ": this thread is not in a loop");
    return *session_;
  }

  // A session that does not record needs no lock: no other thread sees its windows.
  std::unique_lock<std::mutex> lock_for(const Session& s) {
    return s.recording ? std::unique_lock(mutex_) : std::unique_lock<std::mutex>();
  }

  // With the lock held, as the next two.
  Session* current() const { return session_ != nullptr ? session_ : on(arenas_.device()); }

  void close(Session& s) {
    s.op = kNoOp;
    show(s);
  }

  std::unique_ptr<Session> leave() {
    std::unique_ptr<Session> left(std::exchange(session_, session_->outer));
    close(*left);
    if (left->shared) shared_[left->device] = nullptr;
    if (session_ != nullptr) show(*session_);
    std::erase(recordings_, &left->recorded);
    return left;
  }

  // Takes a loop's new arena when a request first needs it, releasing the lock meanwhile. False if there was no room, or the
  // loop's thread closed the window or ended the loop: another session may then lie at its address, so plan numbers are compared.
  bool take_awaited(Session* s, std::unique_lock<std::mutex>& lock) {
    const Awaited wanted = *std::exchange(s->awaited, std::nullopt);
    const std::int64_t number = s->plan_number;
    Arena* arena = nullptr;
    std::exception_ptr failure;
    try {
      arena = arenas_.find(s->plan.arena_bytes, wanted.place, lock, wanted.no_more);
    } catch (...) {
      failure = std::current_exception();
      lock.lock();
    }
    if (s = current(); s == nullptr || s->plan_number != number) {
      if (arena != nullptr) arena->state = Arena::kRetired;
      arenas_.give_back(lock);
      return false;
    }
    s->arena = arena;
    if ((s->failure = failure) != nullptr) s->plan = {};
    return arena != nullptr && s->op != kNoOp;
  }

  // A step waits a while for blocks in its way, or above the planned load: another thread may be about to free them (gloo's keep
  // sent data a moment beyond the wait), or another stream still uses them.
  bool take(Session& s, Offset offset, Bytes bytes, Bytes charge, std::unique_lock<std::mutex>& lock) {
    Slots& slots = s.arena->slots;
    for (;; --s.patience) {
      const bool can_wait = !s.is_loop && s.patience > 0;
      const bool holds_more = slots.used_bytes() + charge > s.plan.load;
      if (!(can_wait && holds_more) && slots.take(offset, bytes, charge, s.row)) return true;
      if (!can_wait) return false;
      lock.unlock();
      std::this_thread::sleep_for(kPause);
      arenas_.poll();
      lock.lock();
    }
  }

  static void count_peak(Session& s) {
    const Bytes used = s.arena->slots.used_bytes();
    s.counters.peak_bytes = std::max(s.counters.peak_bytes, used);
    s.counters.total_peak_bytes = std::max(s.counters.total_peak_bytes, used + s.outlasting);
  }

  void* miss(Session& s, std::int32_t index, Bytes bytes, const char* reason) {
    ++s.counters.num_misses;
    s.counters.missed_bytes += bytes;
    if (s.counters.misses.size() < kMaxMisses) s.counters.misses.push_back({s.op, index, bytes, reason});
    return nullptr;
  }

  inline static thread_local AtThreadExit at_thread_exit_;
  inline static thread_local int patience_ = kPatience;  // of the next step

  std::mutex mutex_;  // guards what other threads touch: arenas, slots, recordings, the shared session
  Arenas arenas_;
  std::vector<Recording*> recordings_;
  std::int64_t num_loop_plans_ = 0;
};

}  // namespace olla::replay
