#include <thread>

#include "heap.hpp"

using namespace olla::replay;

TEST(requests_of_an_op_get_their_planned_addresses) {
  Heap heap;
  heap.memory.activate(small_plan());
  heap.memory.begin(0);
  void *a = heap.allocate(100), *b = heap.allocate(64);
  heap.memory.end();
  heap.memory.begin(1);
  void *c = heap.allocate(64), *d = heap.allocate(32);
  heap.memory.end();
  CHECK_EQ(heap.offset(a), 0);
  CHECK_EQ(heap.offset(b), 128);
  CHECK_EQ(heap.offset(c), 192);
  CHECK(heap.lent.contains(d));
  for (void* block : {a, b, c, d}) heap.free(block);
  const Counters counters = heap.memory.deactivate(false);
  CHECK_EQ(counters.num_hits, 3);
  CHECK_EQ(counters.num_misses, 0);
  CHECK_EQ(counters.peak_bytes, 256);  // 100 counts for 128
  CHECK_EQ(counters.high_water_bytes, 256);
  CHECK(heap.lent.empty());
}

TEST(misses_are_named_and_do_not_shift_later_requests) {
  Heap heap;
  heap.memory.activate(small_plan());
  heap.memory.begin(0);
  void *extra = heap.allocate(40), *a = heap.allocate(100), *b = heap.allocate(64), *more = heap.allocate(64);
  heap.memory.end();
  heap.memory.begin(0);
  void* again = heap.allocate(64);  // its slot is held, and request 0 is left out
  const Counters counters = heap.memory.deactivate(false);
  CHECK(!Memory::inside());
  CHECK_EQ(counters.num_hits, 2);
  CHECK_EQ(counters.num_misses, 3);
  CHECK_EQ(counters.missed_bytes, 40 + 64 + 64);
  std::vector<std::string> misses;
  for (const Miss& m : counters.misses)
    misses.push_back(std::to_string(m.op) + "." + std::to_string(m.index) + " " + std::to_string(m.bytes) + " " + m.reason);
  CHECK_EQ(misses, std::vector<std::string>{"0.0 40 size", "0.3 64 unplanned", "0.0 64 occupied"});
  for (void* block : {extra, a, b, more, again}) heap.free(block);
  CHECK(heap.lent.empty());
}

TEST(a_slot_is_occupied_exactly_while_a_block_overlaps_it) {
  Slots slots;
  std::vector<char> used(64, 0);
  std::map<Offset, Bytes> blocks;
  std::uint32_t state = 1;
  const auto random = [&](std::uint32_t below) { return (state = state * 1664525 + 1013904223) / 65536 % below; };
  for (int i = 0; i < 20000; ++i) {
    const Offset offset = random(60);
    if (const auto block = blocks.find(offset); block != blocks.end() && random(2) == 0) {
      CHECK(slots.give(offset));
      std::fill_n(used.begin() + offset, block->second, 0);
      blocks.erase(block);
      continue;
    }
    const Bytes bytes = 1 + random(4);
    const bool free = std::count(used.begin() + offset, used.begin() + offset + bytes, 1) == 0;
    CHECK_EQ(slots.take(offset, bytes, bytes), free);
    if (free) {
      std::fill_n(used.begin() + offset, bytes, 1);
      blocks[offset] = bytes;
    }
    CHECK_EQ(slots.used_bytes(), std::count(used.begin(), used.end(), 1));
    CHECK_EQ(slots.empty(), blocks.empty());
  }
  CHECK(!slots.give(63));
}

TEST(an_arena_goes_back_when_its_last_block_is_freed) {
  Heap heap;
  heap.memory.activate(small_plan());
  heap.memory.begin(1);
  void* block = heap.allocate(64);
  heap.memory.deactivate(false);
  CHECK_EQ(heap.memory.held_bytes(), 256);
  heap.memory.activate(small_plan());  // the old arena waits; a new one is taken
  CHECK_EQ(heap.memory.held_bytes(), 512);
  std::thread([&] { heap.free(block); }).join();
  CHECK_EQ(heap.memory.held_bytes(), 256);
  heap.memory.deactivate(false);
  CHECK_EQ(heap.memory.held_bytes(), 0);
  CHECK(heap.lent.empty());
}

TEST(a_kept_arena_serves_the_next_table_that_fits) {
  Heap heap;
  heap.memory.activate(small_plan());
  void* const base = heap.memory.arena().first;
  heap.memory.begin(1);
  void* held = heap.allocate(64);
  heap.memory.deactivate(true);
  Plan plan = small_plan();
  heap.memory.activate(plan);
  CHECK_EQ(heap.memory.arena().first, base);
  heap.memory.begin(1);
  void* other = heap.allocate(64);  // still held by the block of the table before
  CHECK(heap.offset(other) != 192);
  CHECK_EQ(heap.memory.deactivate(true).peak_bytes, 64);
  heap.free(other);
  heap.free(held);
  plan.arena_bytes = 512;
  heap.memory.activate(plan);  // too small: goes back
  CHECK_EQ(heap.memory.held_bytes(), 512);
  heap.memory.deactivate(true);
  heap.memory.release();
  CHECK_EQ(heap.memory.held_bytes(), 0);
  CHECK(heap.lent.empty());
}

TEST(an_arena_serves_the_place_it_was_taken_for) {
  std::int64_t place = 1;
  Heap heap;
  Memory memory(
      {kAlignment, [&](Bytes bytes) { return heap.take(bytes); }, [&](void* block) { heap.give(block); }, [&] { return place; }});
  memory.activate(small_plan());
  char* const base = static_cast<char*>(memory.arena().first);
  CHECK(memory.at_place());
  CHECK_EQ(memory.arena_of(base + 255).first, base);
  CHECK(memory.arena_of(base + 256).first == nullptr);
  place = 2;
  CHECK(!memory.at_place());
  memory.begin(0);
  CHECK(memory.refuse(100, "stream") == nullptr);
  const Counters counters = memory.deactivate(true);
  CHECK_EQ(counters.missed_bytes, 100);
  CHECK_EQ(std::string(counters.misses.front().reason), std::string("stream"));
  memory.activate(small_plan());  // not in the arena kept for the other place
  CHECK(memory.arena().first != base);
  CHECK_EQ(memory.held_bytes(), 512);
  memory.deactivate(false);
  memory.release();
  CHECK(heap.lent.empty());
}

TEST(a_recording_tells_in_which_op_a_block_ended) {
  Heap heap;
  record(heap.memory, 3);
  void* outside = heap.allocate(8);
  heap.memory.begin(2);
  void *a = heap.allocate(10), *workspace = heap.allocate(20);
  heap.free(workspace);
  heap.memory.end();
  heap.memory.begin(0);
  void* b = heap.allocate(30);
  heap.memory.end();
  std::thread([&] { heap.free(a); }).join();  // after op 0, before another
  heap.free(outside);
  std::vector<std::vector<std::int64_t>> rows;
  for (const auto& r : heap.memory.stop_recording()) rows.push_back({r.op, r.index, r.bytes, r.freed_in});
  heap.free(b);
  CHECK_EQ(rows, std::vector<std::vector<std::int64_t>>{{2, 0, 10, 0}, {2, 1, 20, 2}, {0, 0, 30, kNoOp}});
  CHECK(heap.lent.empty());
}

TEST(a_table_can_record_what_it_serves_and_what_it_does_not) {
  Heap heap;
  heap.memory.activate(small_plan(), true);
  heap.memory.begin(0);
  void *a = heap.allocate(100), *missed = heap.allocate(40), *b = heap.allocate(64);
  CHECK_EQ(heap.offset(a), 0);
  CHECK_EQ(heap.offset(b), 128);
  heap.free(missed);
  heap.memory.end();
  heap.memory.begin(1);
  heap.free(a);
  void* outside = heap.allocate(32);  // planned to come from the default allocator
  heap.memory.end();
  CHECK(contains(message<StateError>([&] { heap.memory.deactivate(false); }), "no active table"));
  std::vector<std::vector<std::int64_t>> rows;
  for (const auto& r : heap.memory.stop_recording()) rows.push_back({r.op, r.index, r.bytes, r.freed_in, r.freed_at});
  CHECK_EQ(rows,
           std::vector<std::vector<std::int64_t>>{{0, 0, 100, 1, 3}, {0, 1, 40, 0, 3}, {0, 2, 64, -1, -1}, {1, 0, 32, -1, -1}});
  CHECK_EQ(heap.memory.held_bytes(), 256);  // until its last block is freed
  heap.free(b);
  CHECK_EQ(heap.memory.held_bytes(), 0);
  heap.free(outside);
  CHECK(heap.lent.empty());
}

TEST(calls_that_do_not_fit_the_state_are_refused_and_change_nothing) {
  Heap heap;
  CHECK(contains(message<StateError>([&] { heap.memory.begin(0); }), "neither records"));
  CHECK(contains(message<StateError>([&] { heap.memory.deactivate(false); }), "no active table"));
  CHECK(contains(message<StateError>([&] { heap.memory.stop_recording(); }), "does not record"));
  heap.memory.end();
  heap.memory.activate(small_plan());
  CHECK(contains(message<StateError>([&] { heap.memory.activate(small_plan()); }), "already has an active table"));
  CHECK(contains(message<StateError>([&] { record(heap.memory, 1); }), "already has an active table"));
  CHECK(contains(message<StateError>([&] { heap.memory.begin(2); }), "op is 2, expected 0 to 1"));
  heap.memory.begin(0);
  CHECK(contains(message<StateError>([&] { heap.memory.begin(1); }), "op 0 has not ended"));
  void* block = heap.allocate(100);  // the window of op 0 is still open
  CHECK_EQ(heap.offset(block), 0);
  heap.free(block);
  heap.memory.deactivate(false);
  record(heap.memory, 1);
  CHECK(contains(message<StateError>([&] { heap.memory.deactivate(false); }), "no active table"));
  CHECK(heap.memory.stop_recording().empty());
}

TEST(a_table_that_does_not_hold_is_refused) {
  Heap heap;
  const auto refused = [&](auto change) {
    Plan plan = small_plan();
    change(plan);
    return message<std::invalid_argument>([&] { heap.memory.activate(plan); });
  };
  CHECK(contains(refused([](Plan& p) { p.arena_bytes = -1; }), "arena_bytes is -1"));
  CHECK(contains(refused([](Plan& p) { p.alignment = 96; }), "alignment is 96 bytes, expected a multiple of 64"));
  CHECK(contains(refused([](Plan& p) { p.first = {}; }), "op_offset"));
  CHECK(contains(refused([](Plan& p) { p.first = {0, 4, 2}; }), "op_offset"));
  CHECK(contains(refused([](Plan& p) { p.bytes.pop_back(); }), "num_bytes has 3"));
  CHECK(contains(refused([](Plan& p) { p.bytes[1] = 0; }), "request 1 of 0 bytes"));
  CHECK(contains(refused([](Plan& p) { p.offset[1] = 32; }), "no multiple of 64"));
  CHECK(contains(refused([](Plan& p) { p.offset[1] = -64; }), "no multiple of 64"));
  CHECK(contains(refused([](Plan& p) { p.arena_bytes = 255; }), "ends outside the arena of 255 bytes"));
  CHECK(contains(message<std::bad_alloc>([&] { heap.memory.activate({Bytes{1} << 50, 64, {0}, {}, {}}); }), "bad_alloc"));
  heap.memory.activate(small_plan());  // a refused table leaves nothing behind
  heap.memory.deactivate(false);
  CHECK(heap.lent.empty());
}

TEST(threads_have_windows_and_tables_of_their_own) {
  Heap heap;
  heap.memory.activate(small_plan());
  heap.memory.begin(0);
  std::thread([&] {
    CHECK(!Memory::inside());
    CHECK(contains(message<StateError>([&] { heap.memory.begin(0); }), "neither records"));
    heap.memory.activate(small_plan());
    heap.memory.begin(0);
    void* block = heap.allocate(100);
    CHECK_EQ(heap.offset(block), 0);
    heap.free(block);
  }).join();                                // it ends in the middle of a window
  CHECK_EQ(heap.memory.held_bytes(), 256);  // its arena went back
  void* block = heap.allocate(100);
  CHECK_EQ(heap.offset(block), 0);
  heap.free(block);
  heap.memory.deactivate(false);
  CHECK(heap.lent.empty());
}

TEST(misses_beyond_a_thousand_are_counted_only) {
  Heap heap;
  heap.memory.activate(small_plan());
  heap.memory.begin(0);
  for (int i = 0; i < 1500; ++i) heap.free(heap.allocate(7));
  const Counters counters = heap.memory.deactivate(false);
  CHECK_EQ(counters.num_misses, 1500);
  CHECK_EQ(counters.misses.size(), kMaxMisses);
}

TEST(a_forked_child_has_nothing_open) {
  Heap heap;
  heap.memory.open_loop(true);
  heap.memory.plan_loop({64, kAlignment, {0, 1}, {10}, {0}, {0}});
  heap.memory.begin(0);
  void* const block = heap.allocate(10);
  heap.memory.lock();
  heap.memory.forked();  // what the handlers of a fork do
  heap.memory.unlock();
  CHECK(!Memory::inside());
  CHECK(contains(message<StateError>([&] { heap.memory.end(), heap.memory.begin(0); }), "neither records"));
  heap.memory.close_loop();
  CHECK_EQ(heap.memory.held_bytes(), 64);  // its block is in use
  heap.free(block);
  CHECK_EQ(heap.memory.held_bytes(), 0);
  heap.memory.activate(small_plan());  // the child may plan steps of its own
  heap.memory.deactivate(false);
  CHECK(heap.lent.empty());
}

TEST(a_shared_loop_takes_requests_of_threads_without_a_session_of_their_own) {
  Heap heap;
  const auto on_thread = [&](const auto& body) { std::thread(body).join(); };
  heap.memory.open_loop(true);
  heap.memory.begin(0);
  on_thread([&] { heap.free(heap.allocate(100)); });
  heap.memory.end();
  on_thread([&] {
    heap.free(heap.allocate(100));
    CHECK(contains(message<StateError>([&] { heap.memory.open_loop(true); }), "shared with all threads"));
  });
  CHECK_EQ(heap.memory.iteration(0).size(), 1u);
  heap.memory.plan_loop({128, kAlignment, {0, 1}, {100}, {0}, {0}});
  heap.memory.begin(1);
  on_thread([&] {
    void* const block = heap.allocate(100);
    CHECK(heap.memory.arena_of(block).first == block);
    heap.free(block);
  });
  heap.memory.end();
  CHECK_EQ(heap.memory.loop_counters().num_hits, 1);
  heap.memory.begin(2);
  heap.memory.close_loop();
  on_thread([&] { CHECK(!Memory::inside()); });
  CHECK(heap.lent.empty());
}

OLLA_TEST_MAIN

TEST(what_the_default_allocator_gives_counts_for_the_step_of_the_thread_that_asks) {
  Heap heap;
  Memory::count_given(1);  // of no step
  heap.memory.activate(small_plan());
  Memory::count_given(2);
  heap.memory.begin(0);
  Memory::count_given(4);
  std::thread([] { Memory::count_given(8); }).join();
  heap.memory.end();
  CHECK_EQ(heap.memory.deactivate(false).given_bytes, 6);
  heap.memory.open_loop(false);
  Memory::count_given(16);
  CHECK_EQ(heap.memory.loop_counters().given_bytes, 0);
  heap.memory.close_loop();
}
