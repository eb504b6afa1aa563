// Whose window the requests of a thread belong to: its own, or one that a device shares with all threads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "session.hpp"

namespace olla::replay {

// The sessions of a process that requests can belong to. Shared sessions are read and changed under the owner's mutex, except the
// flags that tell whether a window is open.
class ThreadWindows {
 public:
  // Whether a window is open for this thread: its own, or one that a device shares with all threads.
  static bool inside() { return session_ != nullptr ? session_->op != kNoOp : shared_windows_.load() != 0; }
  static bool recording() {
    return session_ != nullptr ? session_->op != kNoOp && session_->recording : shared_windows_.load() != 0;
  }

  // Counts what this thread's step asked the default allocator for, in windows and between them.
  static void count_given(Bytes bytes) {
    if (session_ != nullptr && !session_->is_loop) session_->counters.given_bytes += bytes;
  }

 protected:
  // Whether the window that is open for this thread is of another device than it works on now.
  static bool is_of_another(std::size_t device) {
    return session_ != nullptr ? session_->device != device : (shared_windows_.load() & bit(device)) == 0;
  }

  // The shared session of a device; valid only while the lock is held.
  Session* on(std::size_t device) const { return shared_[device]; }

  // Sets or clears the flag by which other threads see a shared session's window.
  static void show(const Session& s) {
    if (s.op == kNoOp) return hide(s);
    if (s.shared) shared_windows_ |= bit(s.device);
  }
  static void hide(const Session& s) {
    if (s.shared) shared_windows_ &= ~bit(s.device);
  }

  // In the child of a fork.
  void leave_all() {
    while (session_ != nullptr) delete std::exchange(session_, session_->outer);
    shared_.fill(nullptr);
    shared_windows_ = 0;
  }

  inline static thread_local Session* session_ = nullptr;
  std::array<Session*, kMaxDevices> shared_{};  // of each device

 private:
  static std::uint64_t bit(std::size_t device) { return std::uint64_t{1} << device; }

  inline static std::atomic<std::uint64_t> shared_windows_{0};  // a bit for each device whose shared session has one open
};

}  // namespace olla::replay
