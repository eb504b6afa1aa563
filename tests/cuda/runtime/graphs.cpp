// Captures and graphs. A graph keeps the streams it was captured on as lanes, and their waits: what was not joined by an
// event may run in another order than it was captured in.
#include <algorithm>
#include <utility>

#include "work.hpp"

using namespace standin;

namespace {

struct Graph {
  std::vector<std::vector<Work>> lanes;         // the origin's first
  std::vector<std::vector<std::size_t>> after;  // of each work that is a wait: the lane it waits for

  std::size_t num_nodes() const {
    std::size_t count = 0;
    for (const auto& lane : lanes)
      for (const Work& work : lane) count += work.run ? 1 : 0;
    return count;
  }
};

Graph& graph_of(void* handle) { return *static_cast<Graph*>(handle); }

Graph graph_from(Capture& capture) {
  std::vector<Lane*> order{&capture.lanes[capture.origin]};
  for (auto& [stream, lane] : capture.lanes)
    if (stream != capture.origin) order.push_back(&lane);
  Graph graph;
  for (Lane* lane : order) {
    graph.lanes.emplace_back(lane->queue.begin(), lane->queue.end());
    std::vector<std::size_t> after;
    for (const Work& work : graph.lanes.back())
      after.push_back(static_cast<std::size_t>(std::find(order.begin(), order.end(), work.after) - order.begin()));
    graph.after.push_back(std::move(after));
  }
  return graph;
}

void run(const Graph& graph) {
  std::vector<Lane> lanes(graph.lanes.size());
  std::vector<Lane*> order;
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    order.push_back(&lanes[i]);
    for (std::size_t k = 0; k < graph.lanes[i].size(); ++k) {
      Work work = graph.lanes[i][k];
      if (work.after != nullptr) work.after = &lanes[graph.after[i][k]];
      lanes[i].add(std::move(work));
    }
  }
  run_lanes(order);
}

// Whether the origin has waited, through others or itself, for all work of all lanes.
bool joined(const Graph& graph) {
  std::vector<Ticket> reached(graph.lanes.size(), 0);
  std::vector<std::pair<std::size_t, Ticket>> goals{{0, graph.lanes[0].size()}};
  while (!goals.empty()) {
    const auto [lane, until] = goals.back();
    goals.pop_back();
    for (Ticket at = reached[lane]; at < until; ++at)
      if (const Work& work = graph.lanes[lane][at]; work.after != nullptr) goals.emplace_back(graph.after[lane][at], work.ticket);
    reached[lane] = std::max(reached[lane], until);
  }
  for (std::size_t i = 0; i < graph.lanes.size(); ++i)
    for (Ticket at = reached[i]; at < graph.lanes[i].size(); ++at)
      if (graph.lanes[i][at].run) return false;
  return true;
}

}  // namespace

STANDIN_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Lock lock(mutex());
  static unsigned long long num_captures = 0;
  Stream& stream = stream_of(handle);
  if (stream.is_default) RETURN(cudaErrorStreamCaptureUnsupported);
  if (stream.capture) RETURN(cudaErrorIllegalState);
  stream.capture = std::make_shared<Capture>();
  stream.capture->id = ++num_captures;
  stream.capture->origin = &stream;
  stream.capture->mode = mode;
  stream.capture->thread = std::this_thread::get_id();
  stream.capture->lanes[&stream];
  captures()[num_captures] = stream.capture;
  trace(1, "capture %llu begins", num_captures);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* to) {
  const Lock lock(mutex());
  *to = nullptr;
  const std::shared_ptr<Capture> capture = stream_of(handle).capture;
  if (!capture) RETURN(cudaErrorIllegalState);
  if (capture->origin != &stream_of(handle)) RETURN(cudaErrorStreamCaptureUnmatched);
  for (const auto& stream : all_streams())
    if (stream->capture == capture) stream->capture = nullptr;
  captures().erase(capture->id);
  Graph graph = graph_from(*capture);
  trace(1, "capture %llu ends: %zu nodes%s", capture->id, graph.num_nodes(), capture->valid ? "" : ", invalid");
  if (!capture->valid) RETURN(cudaErrorStreamCaptureInvalidated);
  if (!joined(graph)) RETURN(cudaErrorStreamCaptureUnjoined);
  *to = reinterpret_cast<cudaGraph_t>(new Graph(std::move(graph)));
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Lock lock(mutex());
  const auto& capture = stream_of(handle).capture;
  *status = !capture         ? cudaStreamCaptureStatusNone
            : capture->valid ? cudaStreamCaptureStatusActive
                             : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                                 cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                                 std::size_t* count) {
  const Lock lock(mutex());
  cudaStreamIsCapturing(handle, status);
  const auto& capture = stream_of(handle).capture;
  if (id != nullptr) *id = capture ? capture->id : 0;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(capture.get());
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, std::size_t,
                                                            unsigned) {
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*,
                                                      std::size_t, cudaStreamCaptureMode) {
  RETURN(cudaErrorNotSupported);
}
STANDIN_API cudaError_t cudaGraphAddNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*,
                                         std::size_t, cudaGraphNodeParams*) {
  RETURN(cudaErrorNotSupported);
}
STANDIN_API cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned) {
  RETURN(cudaErrorNotSupported);
}
STANDIN_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  return *count = graph_of(graph).num_nodes(), cudaSuccess;
}
STANDIN_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, std::size_t* count) {
  return *count = 0, cudaSuccess;
}
STANDIN_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* to, cudaGraph_t graph, unsigned long long) {
  return *to = reinterpret_cast<cudaGraphExec_t>(new Graph(graph_of(graph))), cudaSuccess;
}
STANDIN_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(to, graph, flags);
}
STANDIN_API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const Lock lock(mutex());
  RETURN(enqueue(stream, [graph = graph_of(exec)] { run(graph); }, __func__));  // a copy: it may be destroyed before
}
STANDIN_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete &graph_of(graph), cudaSuccess; }
STANDIN_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete &graph_of(exec), cudaSuccess; }
STANDIN_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
