#include <random>

#include "olla/order/flow.hpp"
#include "test.hpp"

using namespace olla;
using Node = FlowNetwork::Node;

namespace {

struct Arc {
  Node from, to;
  Bytes capacity;
};

FlowNetwork network_of(Node num_nodes, const std::vector<Arc>& arcs) {
  FlowNetwork network;
  network.reset();
  while (network.num_nodes() < num_nodes) network.add_node();
  for (const Arc& arc : arcs) network.add_edge(arc.from, arc.to, arc.capacity);
  return network;
}

Bytes cost(const std::vector<Arc>& arcs, unsigned source_side) {
  Bytes sum = 0;
  for (const Arc& arc : arcs) sum += (source_side >> arc.from & 1) != 0 && (source_side >> arc.to & 1) == 0 ? arc.capacity : 0;
  return sum;
}

Bytes least_cut(Node num_nodes, const std::vector<Arc>& arcs) {
  Bytes least = kMaxBytes;
  for (unsigned set = 0; set < 1U << num_nodes; ++set) {
    if ((set & 1) != 0 && (set & 2) == 0) least = std::min(least, cost(arcs, set));
  }
  return least;
}

std::vector<Arc> random_arcs(Node num_nodes, std::mt19937& random) {
  std::vector<Arc> arcs(random() % 20);
  for (Arc& arc : arcs) {
    arc = {static_cast<Node>(random() % num_nodes), static_cast<Node>(random() % num_nodes), static_cast<Bytes>(random() % 10)};
  }
  return arcs;
}

constexpr auto kNever = [] { return false; };

}  // namespace

TEST(maximum_flow_equals_the_least_cut_of_random_networks) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    const Node num_nodes = 2 + static_cast<Node>(random() % 6);
    const std::vector<Arc> arcs = random_arcs(num_nodes, random);
    FlowNetwork network = network_of(num_nodes, arcs);
    const Bytes least = least_cut(num_nodes, arcs);
    CHECK_EQ(network.maximise(kMaxBytes, kNever), least);

    std::vector<std::uint8_t> reached, reaching;
    network.reached({FlowNetwork::kSource}, 0, reached);
    network.reaching_sink(0, reaching);
    unsigned smallest = 0, largest = 0;
    for (Node node = 0; node < num_nodes; ++node) {
      smallest |= static_cast<unsigned>(reached[node]) << node;
      largest |= static_cast<unsigned>(reaching[node] == 0) << node;
    }
    CHECK_EQ(cost(arcs, smallest), least);
    CHECK_EQ(cost(arcs, largest), least);
  }
}

TEST(nodes_reached_over_wide_residual_arcs_cost_more_to_move) {
  std::mt19937 random(2);
  for (int i = 0; i < 1000; ++i) {
    const Node num_nodes = 3 + static_cast<Node>(random() % 4);
    const std::vector<Arc> arcs = random_arcs(num_nodes, random);
    FlowNetwork network = network_of(num_nodes, arcs);
    const Bytes least = network.maximise(kMaxBytes, kNever);
    const Bytes above = static_cast<Bytes>(random() % 6);
    std::vector<std::uint8_t> reached, reaching;
    network.reached({FlowNetwork::kSource}, above, reached);
    network.reaching_sink(above, reaching);
    for (Node node = 2; node < num_nodes; ++node) {
      std::vector<Arc> forced = arcs;
      if (reached[node] != 0) forced.push_back({node, FlowNetwork::kSink, 1000});
      if (reaching[node] != 0) forced.push_back({FlowNetwork::kSource, node, 1000});
      if (forced.size() == arcs.size()) continue;
      CHECK(least_cut(num_nodes, forced) > least + above);
    }
  }
}

TEST(flow_stops_once_it_passes_what_is_enough) {
  FlowNetwork network = network_of(3, {{0, 2, 5}, {0, 2, 6}, {2, 1, 20}});
  const Bytes flow = network.maximise(4, kNever);
  CHECK(flow > 4);
  CHECK(flow <= 11);
}

TEST(a_long_path_needs_no_recursion) {
  FlowNetwork network;
  network.reset();
  Node last = FlowNetwork::kSource;
  for (int i = 0; i < 300'000; ++i) {
    const Node node = network.add_node();
    network.add_edge(last, node, 7);
    last = node;
  }
  network.add_edge(last, FlowNetwork::kSink, FlowNetwork::kInfinite);
  CHECK_EQ(network.maximise(kMaxBytes, kNever), 7);
}

OLLA_TEST_MAIN
