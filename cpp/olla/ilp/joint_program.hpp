// OLLA's equation (9): the order and the addresses in one mixed-integer program, for the smallest arena of all orders.
//
// The order is that of the order program (order_program.hpp) with its columns Y[v,t]; its peak column is the arena here, so that
// its memory rows say "load <= arena". To it come, for every two buffers i, j that some order has alive together:
//
//     a[i,j], a[j,i]  i lies below j, j lies below i; one binary b = a[i,j] = 1 - a[j,i] where they are together in every order
//     e[i,j]          i is dead before j is born: e[i,j] <= 1 + Y[u,t-1] - Y[v,t] for every last user u of i, v the op that writes
//     j a[i,j] + a[j,i] + e[i,j] + e[j,i] >= 1         (6) A[i] + S[i] <= A[j] + (1 - a[i,j]) M           (7) A[i] + S[i] <= arena
//     (8)
//
// e is continuous: with binary Y its best value is 0 or 1. Left out, not fixed: pairs that are apart in every order of the target,
// the e that no such order allows, and all that the order program leaves out. Of its safe moves only those that make no lifetime
// longer are taken: the others keep the load, but not a layout.
#pragma once

#include "olla/ilp/address_program.hpp"
#include "olla/ilp/order_program.hpp"

namespace olla {

// The graph whose live bytes are those of the arena: tensors that keep their own storage have no bytes, all other sizes and the
// workspaces are rounded up to the alignment. Its orders are those of graph, its peaks their loads.
Graph arena_graph(const Graph& graph, Bytes alignment);

// What lies in the arena: the tensors that ops write, then the workspaces, as far as they have bytes.
struct ArenaBuffer {
  OpId producer;                 // or the op whose workspace it is
  TensorId tensor;               // -1: a workspace
  std::vector<OpId> last_users;  // alive until the last of them has run; the producer itself where nobody uses it
  bool output;                   // alive to the end
  Bytes size;
};
std::vector<ArenaBuffer> arena_buffers(const Graph& arena,
                                       const Closure* closure);  // closure: to leave out users that others follow
std::vector<Buffer> lifetimes_of(std::span<const ArenaBuffer> buffers, std::span<const OpId> order);

struct Arrangement {
  std::vector<OpId> order;
  std::vector<Offset> offsets;  // of arena buffer i
};

// Describes the orders and layouts of an arena graph whose arena is at most options.target.
class JointProgram : public OrderProgram {
 public:
  JointProgram(const Graph& arena, const OrderProgramOptions& options, const std::function<bool()>& stop);
  JointProgram(const JointProgram&) = delete;

  std::vector<double> encode(const Arrangement& arrangement) const;  // empty if it is above the target
  Arrangement decode(std::span<const double> values) const;          // settled: the truth about an answer

 private:
  struct Pair {  // below: columns of a[i,j] and a[j,i], or of b and -1; dead: of e[i,j] and e[j,i], or -1
    std::int32_t i, j;
    Column below[2], dead[2];
  };
  bool certainly_before(OpId u, OpId v) const;
  bool certainly_apart(const ArenaBuffer& i, const ArenaBuffer& j) const;  // i is dead before j is born, in every order
  bool possibly_apart(const ArenaBuffer& i, const ArenaBuffer& j) const;   // in some order, as far as precedences tell
  bool twins(const ArenaBuffer& i, const ArenaBuffer& j) const;
  void add_pair(std::int32_t i, std::int32_t j);
  Column add_death(const ArenaBuffer& i, const ArenaBuffer& j);

  std::vector<ArenaBuffer> buffers_;
  AddressColumns addresses_{program_};
  std::vector<Pair> pairs_;
};

}  // namespace olla
