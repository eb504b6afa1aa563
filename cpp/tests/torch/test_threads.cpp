// The planning allocator from several threads at once: what the thread sanitizer watches.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <latch>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "test.hpp"
#include "torch/memory.hpp"

using namespace olla::replay;

namespace {

constexpr Bytes kAlignment = 64;
constexpr int kThreads = 4, kRounds = 300, kSlots = 16;

// A default allocator for all threads, as torch's is.
struct Heap {
  std::mutex mutex;
  std::set<void*> lent;
  std::function<void()> before_arena;  // called once, by the thread that takes the next arena
  Memory memory{{kAlignment, [this](Bytes bytes) { return take_arena(bytes); }, [this](void* block) { give(block); }}};

  void* take_arena(Bytes bytes) {
    if (const auto call = std::exchange(before_arena, nullptr)) call();
    return take(bytes);
  }

  void* take(Bytes bytes) {
    const std::lock_guard lock(mutex);
    return *lent.insert(std::malloc(static_cast<std::size_t>(bytes))).first;
  }
  void give(void* block) {
    const std::lock_guard lock(mutex);
    CHECK_EQ(lent.erase(block), 1u);
    std::free(block);
  }
  void* allocate(Bytes bytes) {  // as the allocators of devices do
    if (!Memory::inside()) return take(bytes);
    if (!memory.at_place()) memory.refuse(bytes, "place");
    if (void* block = memory.planned(bytes)) return block;
    void* block = take(bytes);
    if (Memory::recording()) memory.record(block, bytes);
    return block;
  }
  void free(void* block) {
    if (!memory.freed(block)) give(block);
  }
  bool has_lent_nothing() {
    const std::lock_guard lock(mutex);
    return lent.empty();
  }
};

// So many requests of 64 bytes in one op, each at a place of its own.
Plan plan() {
  Plan result{kSlots * kAlignment, kAlignment, {0, kSlots}, {}, {}, {0}};
  for (int k = 0; k < kSlots; ++k) {
    result.bytes.push_back(kAlignment);
    result.offset.push_back(k * kAlignment);
  }
  return result;
}

// Two threads must not hold one block: each writes to its own and finds that again.
void use(Heap& heap, int thread) {
  constexpr int kHeld = 3;
  std::array<int*, kHeld> blocks{};
  for (int*& block : blocks) *(block = static_cast<int*>(heap.allocate(kAlignment))) = thread;
  for (int* block : blocks) {
    CHECK_EQ(*block, thread);
    heap.free(block);
  }
}

template <class Body>
void on_threads(const Body& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

// Threads allocate while this one does something else.
template <class Body>
void while_threads_allocate(Heap& heap, const Body& body) {
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      while (!over) use(heap, i);
    });
  }
  body();
  over = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(threads_share_a_loop_while_its_windows_open_and_close) {
  Heap heap;
  Bytes num_requests = 0;
  while_threads_allocate(heap, [&] {
    for (int round = 0; round < kRounds; ++round) {
      heap.memory.open_loop(true);
      heap.memory.plan_loop(plan());
      for (int k = 0; k < 5; ++k) {
        heap.memory.begin(k);
        use(heap, -1);
        heap.memory.end();
      }
      const Counters counters = heap.memory.loop_counters();
      heap.memory.close_loop();
      num_requests += counters.num_hits + counters.num_misses;
      CHECK(heap.memory.held_bytes() >= 0);
    }
  });
  heap.memory.release();
  CHECK(num_requests >= 3 * 5 * kRounds);
  CHECK(heap.has_lent_nothing());
  CHECK_EQ(heap.memory.held_bytes(), 0);
}

// What a thread takes for a loop while another closes it belongs to no loop: not to the next one either, although that may lie at
// the address of the first.
TEST(an_arena_for_a_loop_that_is_closed_meanwhile_goes_back) {
  for (const bool planned_again : {false, true}) {
    Heap heap;
    std::latch asked(1), answered(1);
    heap.before_arena = [&] {
      asked.count_down();
      answered.wait();
    };
    heap.memory.open_loop(true);
    heap.memory.plan_loop(plan());
    heap.memory.begin(0);
    std::thread other([&] { use(heap, 0); });
    asked.wait();
    heap.memory.end();
    if (!planned_again) {
      heap.memory.close_loop();
      heap.memory.open_loop(true);
    }
    heap.memory.plan_loop(plan());
    heap.memory.begin(0);
    use(heap, -1);
    answered.count_down();
    other.join();
    use(heap, -1);
    heap.memory.end();
    CHECK_EQ(heap.memory.held_bytes(), kSlots * kAlignment);
    CHECK_EQ(heap.memory.loop_counters().num_hits, 8);  // all but the first of the other thread
    heap.memory.close_loop();
    CHECK(heap.has_lent_nothing());
    CHECK_EQ(heap.memory.held_bytes(), 0);
  }
}

TEST(threads_with_tables_of_their_own_free_each_others_blocks) {
  Heap heap;
  std::mutex mutex;
  std::vector<void*> passed;
  on_threads([&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      heap.memory.activate(plan());
      heap.memory.begin(0);
      use(heap, thread);
      void* kept = heap.allocate(kAlignment);
      CHECK(heap.memory.arena_of(kept).first != nullptr);
      heap.memory.end();
      void* other = nullptr;
      {
        const std::lock_guard lock(mutex);
        if (!passed.empty()) {
          other = passed.back();
          passed.pop_back();
        }
        passed.push_back(kept);
      }
      if (other != nullptr) heap.free(other);  // perhaps the last block of another thread's arena
      heap.memory.deactivate(false);
    }
  });
  for (void* block : passed) heap.free(block);
  CHECK(heap.has_lent_nothing());
}

TEST(a_shared_loop_records_what_other_threads_allocate_meanwhile) {
  Heap heap;
  std::size_t num_recorded = 0;
  while_threads_allocate(heap, [&] {
    for (int round = 0; round < kRounds; ++round) {
      heap.memory.open_loop(true);
      heap.memory.begin(0);
      use(heap, -1);
      num_recorded += heap.memory.iteration(0).size();
      heap.memory.end();
      CHECK(heap.memory.iteration(0).size() >= 3);
      heap.memory.close_loop();
    }
  });
  CHECK(num_recorded >= 3 * kRounds);
  CHECK(heap.has_lent_nothing());
}

TEST(a_thread_that_ends_in_the_middle_leaves_nothing_behind) {
  Heap heap;
  on_threads([&](int thread) {
    for (int round = 0; round < kRounds / 10; ++round) {
      std::thread([&] {
        heap.memory.activate(plan(), (round + thread) % 2 == 0);
        heap.memory.begin(0);
        use(heap, thread);
      }).join();
    }
  });
  CHECK(heap.has_lent_nothing());
  CHECK_EQ(heap.memory.held_bytes(), 0);
}

TEST(a_child_forked_while_threads_allocate_can_allocate_and_free) {
  Heap heap;
  const int failures_before = olla::test::failures;
  int status = 0;
  pid_t child = -1;
  while_threads_allocate(heap, [&] {
    heap.memory.open_loop(true);
    heap.memory.plan_loop(plan());
    heap.memory.begin(0);
    void* block = heap.allocate(kAlignment);
    heap.memory.lock();  // as pthread_atfork does in the module; the heap has a lock of its own
    heap.mutex.lock();
    child = fork();
    heap.mutex.unlock();
    heap.memory.unlock();
    if (child == 0) {
      heap.free(block);
      use(heap, -1);
      heap.memory.end();
      heap.memory.close_loop();
      _exit(olla::test::failures == failures_before ? 0 : 1);
    }
    heap.free(block);
    heap.memory.end();
    heap.memory.close_loop();
  });
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(heap.has_lent_nothing());
}

// Two ops, each of one block, the second at `offset`; the first one's is freed by another thread while the second runs.
Counters freed_late(Heap& heap, Offset offset, Bytes load) {
  Plan twice{2 * kAlignment, kAlignment, {0, 1, 2}, {kAlignment, kAlignment}, {0, offset}};
  twice.load = load;
  heap.memory.activate(twice);
  heap.memory.begin(0);
  void* const first = heap.allocate(kAlignment);
  heap.memory.end();
  CHECK_EQ(heap.memory.live(0), 1);
  std::thread other([&] {
    std::this_thread::sleep_for(kPause * 200);
    heap.free(first);
  });
  heap.memory.begin(1);
  void* const second = heap.allocate(kAlignment);
  heap.memory.end();
  other.join();
  CHECK_EQ(heap.memory.live(0), 0);
  heap.free(second);
  return heap.memory.deactivate(false);
}

TEST(what_another_thread_is_about_to_free_is_waited_for) {
  Heap heap;
  bool waited = false;
  for (int round = 0; round < kRounds && !waited; ++round) {  // on a busy machine the other thread may come too late
    const Counters place = freed_late(heap, 0, kUnknownLoad), load = freed_late(heap, kAlignment, kAlignment);
    CHECK_EQ(load.num_misses, 0);
    waited = place.num_misses == 0 && load.peak_bytes == kAlignment;
  }
  CHECK(waited);
  CHECK_EQ(freed_late(heap, kAlignment, kUnknownLoad).peak_bytes, 2 * kAlignment);
  CHECK(heap.has_lent_nothing());
}

TEST(after_a_step_that_waited_in_vain_the_next_ones_wait_a_little) {
  Heap heap;
  const Plan twice{kAlignment, kAlignment, {0, 2}, {kAlignment, kAlignment}, {0, 0}};
  const auto seconds = [&] {
    heap.memory.activate(twice);
    heap.memory.begin(0);
    void* const first = heap.allocate(kAlignment);
    const auto start = std::chrono::steady_clock::now();
    void* const second = heap.allocate(kAlignment);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    heap.memory.end();
    heap.free(first);
    heap.free(second);
    CHECK_EQ(heap.memory.deactivate(false).num_misses, 1);
    return taken.count();
  };
  const auto least = [](int pauses) { return std::chrono::duration<double>(kPause * pauses).count(); };
  CHECK(seconds() >= least(kPatience));
  double shortest = seconds();
  for (int i = 0; i < 10; ++i) shortest = std::min(shortest, seconds());
  CHECK(shortest >= least(kLittlePatience) && shortest < least(kPatience));
  heap.memory.activate(plan());
  CHECK_EQ(heap.memory.deactivate(false).num_misses, 0);
  CHECK(seconds() >= least(kPatience));
  CHECK(heap.has_lent_nothing());
}

OLLA_TEST_MAIN
