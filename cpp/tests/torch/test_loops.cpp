#include <thread>

#include "heap.hpp"

using namespace olla::replay;

namespace {

using Offsets = std::vector<Offset>;

// The offsets of an iteration's requests, all alive until it ends; -1: outside the arena.
Offsets offsets_of(Heap& heap, OpId iteration, std::initializer_list<Bytes> sizes) {
  std::vector<void*> blocks;
  heap.memory.begin(iteration);
  for (const Bytes size : sizes) blocks.push_back(heap.allocate(size));
  heap.memory.end();
  Offsets offsets;
  for (void* block : blocks) {
    const Offset offset = heap.offset(block);
    offsets.push_back(0 <= offset && offset < heap.memory.arena().second ? offset : -1);
    heap.free(block);
  }
  return offsets;
}

}  // namespace

TEST(a_sequence_goes_on_after_a_request_more_or_less) {
  Heap heap;
  heap.memory.open_loop(false);
  heap.memory.plan_loop({448, kAlignment, {0, 7}, {10, 20, 30, 20, 40, 30, 50}, {0, 64, 128, 192, 256, 320, 384}, {0}});
  OpId iteration = 0;
  const auto offsets = [&](std::initializer_list<Bytes> sizes) { return offsets_of(heap, iteration++, sizes); };
  CHECK(offsets({10, 20, 30, 20, 40, 30, 50}) == (Offsets{0, 64, 128, 192, 256, 320, 384}));
  CHECK(offsets({10, 30, 20, 30, 20}) == (Offsets{0, -1, 64, 128, 192}));           // 30 was one more
  CHECK(offsets({10, 50, 20, 30, 20, 40}) == (Offsets{0, -1, 64, 128, 192, 256}));  // 50 was one more
  CHECK(offsets({10, 20, 30, 40, 30, 50}) == (Offsets{0, 64, 128, -1, 320, 384}));  // the second 20 was left out
  CHECK_EQ(heap.memory.loop_counters().num_misses, 3);
  CHECK_EQ(heap.memory.loop_counters().num_misses, 0);
  heap.memory.close_loop();
  CHECK(heap.lent.empty());
}

TEST(a_sequence_that_went_on_too_far_ahead_comes_back) {
  Heap heap;
  heap.memory.open_loop(false);
  heap.memory.plan_loop({512, kAlignment, {0, 8}, {10, 20, 30, 40, 50, 20, 40, 60}, {0, 64, 128, 192, 256, 320, 384, 448}, {0}});
  // 30 was left out: 20 and 40 follow each other much later, and 50 tells that it was here.
  CHECK(offsets_of(heap, 0, {10, 20, 40, 50, 20, 40, 60}) == (Offsets{0, 64, 384, 256, 320, -1, 448}));
  CHECK_EQ(heap.memory.loop_counters().num_misses, 1);
  heap.memory.close_loop();
  CHECK(heap.lent.empty());
}

TEST(two_requests_in_a_row_tell_the_kind_of_an_iteration_that_began_otherwise) {
  Heap heap;
  heap.memory.open_loop(false);
  heap.memory.plan_loop({512, kAlignment, {0, 4, 8}, {10, 20, 30, 40, 10, 50, 60, 70}, {0, 64, 128, 192, 0, 64, 128, 256}, {0, 0}});
  CHECK(offsets_of(heap, 0, {99, 50, 60, 70}) == (Offsets{-1, -1, 128, 256}));
  CHECK_EQ(heap.memory.loop_row().first, 1);
  heap.memory.close_loop();
}

TEST(the_requests_of_an_iteration_tell_its_kind) {
  Heap heap;
  heap.memory.open_loop(false);
  heap.memory.plan_loop(
      {256, kAlignment, {0, 3, 5, 8}, {10, 20, 30, 50, 60, 10, 20, 40}, {0, 64, 128, 0, 64, 192, 128, 0}, {0, 0, 0}});
  const auto kind = [&] { return heap.memory.loop_row().first; };
  CHECK(offsets_of(heap, 0, {10, 20, 30}) == (Offsets{0, 64, 128}));
  CHECK_EQ(kind(), 0);
  CHECK(offsets_of(heap, 1, {50, 60}) == (Offsets{0, 64}));
  CHECK_EQ(kind(), 1);
  // Two kinds begin alike: the first one answers until they part, and then the place of its first block is still taken.
  CHECK(offsets_of(heap, 2, {10, 20, 40}) == (Offsets{0, 64, -1}));
  CHECK_EQ(kind(), 2);
  CHECK(offsets_of(heap, 3, {70, 50}) == (Offsets{-1, -1}));  // after a miss no other kind is looked for
  CHECK_EQ(kind(), 0);
  CHECK(offsets_of(heap, 4, {}).empty());
  CHECK_EQ(kind(), kNoOp);
  heap.memory.close_loop();
}

TEST(shorter_iterations_take_the_places_of_the_longest) {
  Heap heap;
  heap.memory.open_loop(false);
  //                                                      varies: request 1, 2 and 4
  heap.memory.plan_loop(
      {448, kAlignment, {0, 6}, {10, 40, 40, 20, 60, 30}, {0, 64, 128, 192, 256, 320}, {0}, {10, 1, 1, 20, 5, 30}});
  CHECK(offsets_of(heap, 0, {10, 40, 40, 20, 60, 30}) == (Offsets{0, 64, 128, 192, 256, 320}));
  CHECK(offsets_of(heap, 1, {10, 7, 9, 20, 5, 30}) == (Offsets{0, 64, 128, 192, 256, 320}));
  CHECK_EQ(heap.memory.loop_counters().num_misses, 0);
  CHECK(offsets_of(heap, 2, {10, 50, 41, 20, 70, 30}) == (Offsets{0, -1, -1, 192, -1, 320}));         // longer than any before
  CHECK(offsets_of(heap, 3, {10, 7, 9, 99, 20, 5, 30}) == (Offsets{0, 64, 128, -1, 192, 256, 320}));  // 99 was one more
  CHECK_EQ(heap.memory.loop_counters().num_misses, 4);
  const Plan bad{64, kAlignment, {0, 1}, {10}, {0}, {0}, {11}};
  CHECK(contains(message<std::invalid_argument>([&] { heap.memory.plan_loop(bad); }), "may be as small as 11"));
  const Plan few{64, kAlignment, {0, 1}, {10}, {0}, {0}, {1, 1}};
  CHECK(contains(message<std::invalid_argument>([&] { heap.memory.plan_loop(few); }), "least has 2 entries, expected 1"));
  heap.memory.close_loop();
}

TEST(blocks_found_in_the_arena_tell_the_kind_before_any_request) {
  Heap heap;
  heap.memory.open_loop(false);
  heap.memory.plan_loop({256, kAlignment, {0, 2, 4}, {10, 20, 10, 20}, {0, 64, 128, 192}, {0, 128}});
  heap.memory.begin(0);
  std::vector<void*> blocks{heap.allocate(10), heap.allocate(20)};
  heap.memory.end();
  CHECK(offsets_of(heap, 1, {10, 20}) == (Offsets{128, 192}));
  const auto [kind, held] = heap.memory.loop_row();
  CHECK_EQ(kind, 1);
  CHECK_EQ(held.size(), 2u);
  CHECK(held[1].offset == 64 && held[1].end == 84 && held[1].owner == 0);
  for (void* block : blocks) heap.free(block);
  CHECK(offsets_of(heap, 2, {10, 20}) == (Offsets{0, 64}));
  heap.memory.close_loop();
  CHECK(heap.lent.empty());
}

TEST(a_loop_records_planned_requests_too_and_forgets_on_demand) {
  Heap heap;
  heap.memory.open_loop(false);
  heap.memory.plan_loop({128, kAlignment, {0, 1}, {10}, {0}, {0}});
  std::vector<void*> blocks;
  for (OpId i = 0; i < 4; ++i) {
    heap.memory.begin(i);
    blocks.push_back(heap.allocate(10));
    blocks.push_back(heap.allocate(20 + i));
    heap.memory.end();
  }
  CHECK_EQ(heap.memory.iteration(1).size(), 2u);
  heap.memory.forget(1);
  CHECK(heap.memory.iteration(1).empty());
  heap.free(blocks[2]);
  heap.free(blocks[0]);
  heap.free(blocks[7]);
  CHECK_EQ(heap.memory.iteration(0)[0].freed_at, 8);
  CHECK_EQ(heap.memory.iteration(0)[1].freed_at, -1);
  CHECK_EQ(heap.memory.iteration(3)[1].freed_in, 3);
  CHECK_EQ(heap.memory.iteration(3)[1].made_at, 7);
  heap.memory.forget(0);
  heap.memory.forget(3);
  CHECK_EQ(heap.memory.iteration(2).size(), 2u);
  for (const int i : {1, 3, 4, 5, 6}) heap.free(blocks[i]);
  CHECK_EQ(heap.memory.iteration(2)[1].freed_at, 8);
  heap.memory.close_loop();
  CHECK(heap.lent.empty());
}

TEST(a_larger_plan_takes_another_arena_and_one_without_room_leaves_none) {
  Heap heap;
  heap.memory.open_loop(false);
  heap.memory.plan_loop({64, kAlignment, {0, 1}, {10}, {0}, {0}});
  heap.memory.begin(0);
  void* const block = heap.allocate(10);
  CHECK(contains(message<StateError>([&] { heap.memory.plan_loop({}); }), "iteration 0 has not ended"));
  heap.memory.end();
  heap.memory.plan_loop({128, kAlignment, {0, 1}, {10}, {64}, {0}});
  CHECK_EQ(heap.memory.held_bytes(), 64);  // a request takes the other one
  heap.memory.begin(1);
  void* const other = heap.allocate(10);
  heap.memory.end();
  CHECK_EQ(heap.offset(other), 64);
  CHECK_EQ(heap.memory.held_bytes(), 192);
  heap.free(block);
  CHECK_EQ(heap.memory.held_bytes(), 128);
  heap.free(other);
  heap.memory.plan_loop({Bytes{1} << 50, kAlignment, {0, 1}, {10}, {0}, {0}});
  CHECK_EQ(heap.memory.held_bytes(), 0);
  CHECK(offsets_of(heap, 2, {10}) == Offsets{-1});
  CHECK(contains(message<std::bad_alloc>([&] { heap.memory.loop_counters(); }), "bad_alloc"));
  CHECK(offsets_of(heap, 3, {10}) == Offsets{-1});
  CHECK_EQ(heap.memory.loop_counters().num_hits, 2);  // before
  heap.memory.close_loop();
  CHECK(heap.lent.empty());
}

TEST(an_arena_that_would_add_to_what_the_process_takes_is_not_taken_where_that_is_asked_for) {
  Heap heap;
  Bytes most = 64;
  Memory memory({.alignment = kAlignment,
                 .take = [&](Bytes bytes) { return heap.take(bytes); },
                 .give = [&](void* block) { heap.give(block); },
                 .require_no_more =
                     [&](Bytes bytes) {
                       if (bytes > most) throw std::bad_alloc();
                     }});
  memory.open_loop(false);
  const auto request = [&](OpId iteration, bool no_more) {
    memory.plan_loop({128, kAlignment, {0, 1}, {10}, {64}, {0}}, no_more);
    memory.begin(iteration);
    void* const block = memory.planned(10);
    memory.end();
    if (block != nullptr) memory.freed(block);
    return block != nullptr;
  };
  CHECK(!request(0, true));
  CHECK(contains(message<std::bad_alloc>([&] { memory.loop_counters(); }), "bad_alloc"));
  CHECK(request(1, false));
  memory.unplan_loop();
  most = 128;
  CHECK(request(2, true));
  memory.close_loop();
  CHECK(heap.lent.empty());
}

TEST(a_step_inside_a_loop_suspends_it) {
  Heap heap;
  heap.memory.open_loop(true);
  CHECK(contains(message<StateError>([&] { heap.memory.open_loop(true); }), "pools do not nest"));
  heap.memory.begin(0);
  void* const before = heap.allocate(8);
  record(heap.memory, 1);
  CHECK(contains(message<StateError>([&] { heap.memory.open_loop(true); }), "already records"));
  std::thread([] { CHECK(!Memory::inside()); }).join();
  heap.free(heap.allocate(100));  // between two ops of the step
  heap.memory.begin(0);
  heap.free(heap.allocate(16));
  heap.memory.end();
  CHECK_EQ(heap.memory.stop_recording().size(), 1u);
  std::thread([] { CHECK(Memory::inside()); }).join();
  heap.memory.activate(small_plan());
  heap.memory.begin(0);
  heap.free(heap.allocate(100));
  CHECK_EQ(heap.memory.deactivate(false).num_hits, 1);
  heap.memory.activate(small_plan());
  heap.memory.begin(0);
  heap.memory.abandon();  // the step alone
  heap.free(before);
  heap.free(heap.allocate(32));
  heap.memory.end();
  std::vector<Bytes> sizes;
  for (const auto& a : heap.memory.iteration(0)) sizes.push_back(a.bytes);
  CHECK_EQ(sizes, std::vector<Bytes>{8, 32});
  record(heap.memory, 1);
  heap.memory.close_loop();  // with what is open inside
  heap.memory.close_loop();
  CHECK(!Memory::inside());
  heap.memory.release();
  CHECK(heap.lent.empty());
}

OLLA_TEST_MAIN
