#include <algorithm>
#include <random>

#include "olla/base/error.hpp"
#include "olla/swap/search.hpp"
#include "test.hpp"

using namespace olla;

namespace {

constexpr Link kUnit{1.0, 0.0, 1.0, 0.0};

bool close(double a, double b) { return std::abs(a - b) < 1e-9 * (1 + std::abs(a)); }

// The rules of timeline.hpp word by word: at every step, everything is found anew from its definition.
struct Naive {
  const std::vector<Bytes>& live;
  const std::vector<double>& seconds;
  const std::vector<Swap>& swaps;
  Link link;
  std::vector<double> start, end, out_end, in_end;

  Naive(const std::vector<Bytes>& l, const std::vector<double>& d, const std::vector<Swap>& s, const Link& k, Bytes limit)
      : live(l), seconds(d), swaps(s), link(k), out_end(s.size(), 1e30), in_end(s.size(), 1e30) {
    double in_free = 0;
    for (Step step = 0; step < static_cast<Step>(live.size()); ++step) {
      double now = step ? end[step - 1] : 0.0;
      std::vector<double> ends = out_end;
      std::sort(ends.begin(), ends.end());
      double wanted = now;  // the earliest time with enough memory; the last useful one if there is none
      for (const double time : ends)
        if (time < 1e30 && memory(step, wanted) > limit && memory(step, time) < memory(step, wanted)) wanted = std::max(now, time);
      now = wanted;
      std::vector<std::size_t> issued;
      for (std::size_t i = 0; i < swaps.size(); ++i)
        if (swaps[i].issue == step) issued.push_back(i);
      std::stable_sort(issued.begin(), issued.end(), [&](std::size_t a, std::size_t b) { return swaps[a].next < swaps[b].next; });
      for (const std::size_t i : issued)
        in_free = in_end[i] = std::max({in_free, now, out_end[i]}) + link.in_seconds(swaps[i].bytes);
      for (std::size_t i = 0; i < swaps.size(); ++i)
        if (swaps[i].next == step) now = std::max(now, in_end[i]);
      start.push_back(now);
      end.push_back(now + seconds[step]);
      double out_free = 0;
      for (std::size_t i = 0; i < swaps.size() && swaps[i].ready <= step; ++i)
        out_free = out_end[i] = std::max(out_free, end[swaps[i].ready]) + link.out_seconds(swaps[i].bytes);
    }
  }
  Bytes memory(Step step, double time) const {
    Bytes bytes = live[step];
    for (std::size_t i = 0; i < swaps.size(); ++i)
      if (swaps[i].last < step && step < swaps[i].issue && out_end[i] <= time) bytes -= swaps[i].bytes;
    return bytes;
  }
};

}  // namespace

TEST(copy_beside_ops_frees_the_block_for_the_ops_between) {
  const std::vector<Bytes> live{10, 10, 10, 10, 10};
  const std::vector<double> seconds(5, 1.0);
  const std::vector<Swap> swaps{{1, 0, 0, 3, 4}};
  const Timeline t = swap_timeline({live, seconds}, swaps, kUnit, kNoLimit);
  CHECK_EQ(t.live, std::vector<Bytes>{10, 10, 9, 10, 10});
  CHECK_EQ(t.freed, std::vector<Step>{2});
  CHECK_EQ(t.stall_seconds, 0.0);
  CHECK_EQ(t.host_bytes, 1);
}

TEST(op_waits_for_its_input) {
  const std::vector<Bytes> live{10, 10, 10, 10, 10};
  const std::vector<double> seconds(5, 1.0);
  const std::vector<Swap> swaps{{1, 0, 0, 4, 4}};
  const Timeline t = swap_timeline({live, seconds}, swaps, kUnit, kNoLimit);
  CHECK_EQ(t.start, std::vector<double>{0, 1, 2, 3, 5});
  CHECK_EQ(t.stall_seconds, 1.0);
}

TEST(op_waits_at_the_limit_until_a_copy_out_has_ended) {
  const std::vector<Bytes> live{4, 10, 4, 4, 4, 4};
  const std::vector<double> seconds(6, 1.0);
  const std::vector<Swap> swaps{{3, 0, 0, 2, 5}};
  const Timeline t = swap_timeline({live, seconds}, swaps, kUnit, 7);
  CHECK_EQ(t.start[1], 4.0);
  CHECK_EQ(t.peak, 7);
  CHECK_EQ(t.stall_seconds, 3.0);
}

TEST(copies_out_go_one_after_the_other) {
  const std::vector<Bytes> live(6, 10);
  const std::vector<double> seconds(6, 1.0);
  const std::vector<Swap> swaps{{2, 0, 0, 5, 5}, {1, 0, 0, 5, 5}};
  const Timeline t = swap_timeline({live, seconds}, swaps, kUnit, kNoLimit);
  CHECK_EQ(t.out_end, std::vector<double>{3, 4});
  CHECK_EQ(t.live, std::vector<Bytes>{10, 10, 10, 8, 7, 10});
  CHECK_EQ(t.host_bytes, 3);
}

TEST(copies_in_are_issued_as_late_as_no_op_waits) {
  const std::vector<Bytes> live(8, 10);
  const std::vector<double> seconds(8, 1.0);
  std::vector<Swap> swaps{{2, 0, 0, 7, 7}, {1, 1, 1, 6, 6}};
  issue_backwards({live, seconds}, swaps, kUnit, kNoLimit);
  CHECK_EQ(swaps[0].issue, 5);
  CHECK_EQ(swaps[1].issue, 4);
  CHECK_EQ(swap_timeline({live, seconds}, swaps, kUnit, kNoLimit).stall_seconds, 0.0);
}

TEST(swap_out_of_its_range_is_rejected) {
  const std::vector<Bytes> live(4, 1);
  const std::vector<double> seconds(4, 1.0);
  CHECK_THROWS(swap_timeline({live, seconds}, std::vector<Swap>{{1, 0, 2, 2, 3}}, kUnit, kNoLimit), PlanError, "swap");
  CHECK_THROWS(swap_timeline({live, seconds}, std::vector<Swap>{{1, 0, 0, 2, 4}}, kUnit, kNoLimit), PlanError, "swap");
  // The copy behind one that waits for op 2 cannot be brought back at op 2.
  CHECK_THROWS(swap_timeline({live, seconds}, std::vector<Swap>{{1, 2, 2, 3, 3}, {1, 0, 0, 2, 2}}, kUnit, kNoLimit), PlanError,
               "swap");
}

TEST(block_that_lasts_is_away_before_its_first_use_and_after_its_last) {
  const std::vector<Bytes> live(5, 10);
  const std::vector<double> seconds(5, 1.0);
  std::vector<Swap> swaps{{1, -1, -1, 2, 2}, {1, 2, 2, 5, 5}};
  issue_backwards({live, seconds}, swaps, kUnit, kNoLimit);
  CHECK_EQ(swaps[0].issue, 1);
  Timeline t = swap_timeline({live, seconds}, swaps, kUnit, kNoLimit);
  CHECK_EQ(t.live, std::vector<Bytes>({9, 10, 10, 10, 9}));
  CHECK_EQ(t.stall_seconds, 0.0);
  CHECK_EQ(t.host_bytes, 1);
  swaps[1].bytes = 4;  // the step ends when the copy does
  CHECK(close(swap_timeline({live, seconds}, swaps, kUnit, kNoLimit).stall_seconds, 2.0));
  CHECK_THROWS(swap_timeline({live, seconds}, std::vector<Swap>{{1, 0, 0, 2, 2}, {1, -1, -1, 2, 2}}, kUnit, kNoLimit), PlanError,
               "swap");
}

TEST(timeline_equals_the_naive_one_on_random_swaps) {
  std::mt19937 random(1);
  const auto draw = [&](int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(random); };
  int num_stalled = 0, num_freed = 0;
  for (int round = 0; round < 3000; ++round) {
    const int n = draw(3, 14);
    std::vector<Bytes> live;
    std::vector<double> seconds;
    for (int s = 0; s < n; ++s) live.push_back(draw(30, 60)), seconds.push_back(draw(0, 4));
    std::vector<Swap> swaps;
    for (int i = draw(0, 5); i > 0; --i) {
      const Step last = draw(0, n - 2), next = draw(last + 1, n - 1), issue = draw(last + 1, next);
      swaps.push_back({draw(1, 6), draw(0, last), last, issue, next});
    }
    std::sort(swaps.begin(), swaps.end(), [](const Swap& a, const Swap& b) { return a.ready < b.ready; });
    const Link link{static_cast<double>(draw(1, 3)), 0.5, static_cast<double>(draw(1, 3)), 0.25};
    const Bytes limit = draw(0, 1) ? draw(30, 60) : kNoLimit;
    const Timeline t = swap_timeline({live, seconds}, swaps, link, limit);
    const Naive naive(live, seconds, swaps, link, limit);
    for (int s = 0; s < n; ++s) CHECK(close(t.start[s], naive.start[s]));
    for (std::size_t i = 0; i < swaps.size(); ++i) {
      CHECK(close(t.out_end[i], naive.out_end[i]));
      CHECK(close(t.in_end[i], naive.in_end[i]));
      num_freed += t.freed[i] < swaps[i].issue;
    }
    num_stalled += t.stall_seconds > 0;
    Bytes peak = 0;
    for (const Bytes bytes : t.live) peak = std::max(peak, bytes);
    CHECK_EQ(t.peak, peak);
  }
  CHECK(num_stalled > 500);
  CHECK(num_freed > 500);
}

TEST(copies_issued_backwards_never_stall_without_a_limit_where_their_gaps_are_long_enough) {
  std::mt19937 random(2);
  const auto draw = [&](int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(random); };
  for (int round = 0; round < 300; ++round) {
    const int n = 40;
    const std::vector<Bytes> live(n, 100);
    std::vector<double> seconds;
    for (int s = 0; s < n; ++s) seconds.push_back(draw(1, 3));
    std::vector<Swap> swaps;
    for (int i = draw(1, 4); i > 0; --i) {
      const Step last = draw(0, 8), next = draw(30, n - 1);
      swaps.push_back({draw(1, 3), last, last, next, next});
    }
    std::sort(swaps.begin(), swaps.end(), [](const Swap& a, const Swap& b) { return a.ready < b.ready; });
    issue_backwards({live, seconds}, swaps, kUnit, kNoLimit);
    const Timeline t = swap_timeline({live, seconds}, swaps, kUnit, kNoLimit);
    CHECK(t.stall_seconds < 1e-9);
    for (std::size_t i = 0; i < swaps.size(); ++i) CHECK(t.freed[i] < swaps[i].issue);
  }
}

TEST(search_finds_the_best_choice_of_few_blocks) {
  std::mt19937 random(3);
  const auto draw = [&](int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(random); };
  int num_best = 0;
  constexpr int kRounds = 60;
  for (int round = 0; round < kRounds; ++round) {
    const int n = 16;
    std::vector<Bytes> live;
    for (int s = 0; s < n; ++s) live.push_back(40 - 4 * std::abs(s - n / 2));
    const std::vector<double> seconds(n, 1.0);
    std::vector<IdleBlock> blocks;
    for (int i = 0; i < 6; ++i) {
      const Step last = draw(0, 6);
      blocks.push_back({i, draw(1, 4), last, last, draw(9, n - 1)});
    }
    SwapSearch search(live, seconds, blocks, kUnit, kMaxBytes);
    Bytes best = kMaxBytes;
    for (int set = 0; set < 64; ++set) {
      std::vector<std::int32_t> chosen;
      for (int i = 0; i < 6; ++i)
        if (set >> i & 1) chosen.push_back(i);
      for (const bool by_last : {true, false}) {
        const SwapChoice choice = search.evaluate(chosen, 0, false, by_last);
        if (choice.timeline.stall_seconds < 1e-9) best = std::min(best, choice.timeline.peak);
      }
    }
    Control control("swap", 60.0, nullptr);
    const SwapChoice found = search.least_peak(0.0, {}, 0, 100, control);
    CHECK(found.timeline.peak >= best);
    CHECK(found.timeline.stall_seconds < 1e-9);
    num_best += found.timeline.peak == best;
  }
  CHECK(num_best >= kRounds - 3);
}

OLLA_TEST_MAIN
