/* Graphs: captured from one stream, a plain sequence, launched as one operation that reports one record a node. */
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "settings.h"

struct node {
    enum op_kind kind;
    enum fakegpu_copy copy;
    const char *name;
    uint64_t bytes;
    uint32_t grid[3], block[3], shared_bytes;
    int64_t duration_ns, offset_ns; /* as captured */
};

struct nodes {
    uint32_t count, room;
    struct node *node;
};

struct graph {
    struct pooled pooled;
    struct nodes nodes;
};

struct graph_exec {
    struct pooled pooled;
    uint32_t id;
    struct nodes nodes;
    uint64_t launched; /* still in a queue */
    bool destroyed;
};

static struct pool graphs = POOL(struct graph, 4096);
static struct pool execs = POOL(struct graph_exec, 4096);
static uint32_t last_id;

CUresult graph_append(struct graph *graph, const struct op *op) {
    if (op->kind == OP_WAIT || op->kind == OP_RECORD) return CUDA_SUCCESS; /* one stream is in order anyway */
    if (op->kind == OP_REMOTE || op->kind == OP_GRAPH) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct nodes *nodes = &graph->nodes;
    if (nodes->count == nodes->room) {
        uint32_t room = nodes->room ? nodes->room * 2 : 64;
        struct node *grown = realloc(nodes->node, room * sizeof *grown);
        if (!grown) return CUDA_ERROR_OUT_OF_MEMORY;
        nodes->node = grown;
        nodes->room = room;
    }
    struct node *last = nodes->count ? &nodes->node[nodes->count - 1] : NULL;
    struct node *node = &nodes->node[nodes->count++];
    *node = (struct node){
        .kind = op->kind,
        .copy = op->copy,
        .name = op->name,
        .bytes = op->bytes,
        .shared_bytes = op->shared_bytes,
        .duration_ns = op->duration_ns,
        .offset_ns = last ? last->offset_ns + last->duration_ns : 0,
    };
    memcpy(node->grid, op->grid, sizeof node->grid);
    memcpy(node->block, op->block, sizeof node->block);
    return CUDA_SUCCESS;
}

void graph_exec_release(struct graph_exec *exec) {
    if (--exec->launched || !exec->destroyed) return;
    free(exec->nodes.node);
    pool_return(&execs, exec);
}

static int64_t captured_ns(const struct nodes *nodes) {
    const struct node *last = nodes->count ? &nodes->node[nodes->count - 1] : NULL;
    return last ? last->offset_ns + last->duration_ns : 0;
}

bool graph_node_record(const struct op *op, uint32_t index, struct fakegpu_record *record) {
    const struct nodes *nodes = &op->graph->nodes;
    if (index >= nodes->count) return false;
    const struct node *node = &nodes->node[index];
    int64_t captured = captured_ns(nodes);
    double scale = captured ? (double)(op->end_ns - op->start_ns) / (double)captured : 0;
    record->kind = node->kind == OP_COPY ? FAKEGPU_COPY : node->kind == OP_SET ? FAKEGPU_SET : FAKEGPU_KERNEL;
    record->copy = node->copy;
    record->name = node->name;
    record->bytes = node->bytes;
    record->shared_bytes = node->shared_bytes;
    memcpy(record->grid, node->grid, sizeof record->grid);
    memcpy(record->block, node->block, sizeof record->block);
    record->start_ns = record->transfer_ns = op->start_ns + (int64_t)((double)node->offset_ns * scale);
    record->end_ns = op->start_ns + (int64_t)((double)(node->offset_ns + node->duration_ns) * scale);
    record->graph = op->graph->id;
    record->graph_node = index + 1;
    return true;
}

CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
    DRIVER_CALL;
    if (mode < 0 || mode > 2) RETURN(CUDA_ERROR_INVALID_VALUE);
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, false, &stream);
    /* The legacy default stream cannot be captured: all others would have to be with it. */
    if (!result && stream->legacy) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (!result && stream->capture) result = CUDA_ERROR_ILLEGAL_STATE;
    if (!result && !(stream->capture = pool_take(&graphs))) result = CUDA_ERROR_OUT_OF_MEMORY;
    engine_unlock();
    RETURN(result);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    DRIVER_CALL;
    if (!graph) RETURN(CUDA_ERROR_INVALID_VALUE);
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, false, &stream);
    if (!result && !stream->capture) result = CUDA_ERROR_ILLEGAL_STATE;
    if (!result) {
        *graph = (CUgraph)stream->capture;
        stream->capture = NULL;
    }
    engine_unlock();
    RETURN(result);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph handle, unsigned long long flags) {
    DRIVER_CALL;
    (void)flags;
    if (!exec) RETURN(CUDA_ERROR_INVALID_VALUE);
    engine_lock();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    struct graph *graph = pool_check(&graphs, handle);
    struct graph_exec *made = graph ? pool_take(&execs) : NULL;
    if (made) {
        size_t bytes = graph->nodes.count * sizeof *graph->nodes.node;
        made->nodes = (struct nodes){graph->nodes.count, graph->nodes.count, malloc(bytes ? bytes : 1)};
        if (!made->nodes.node) abort();
        if (bytes) memcpy(made->nodes.node, graph->nodes.node, bytes);
        made->id = ++last_id;
        *exec = (CUgraphExec)made;
        result = CUDA_SUCCESS;
    }
    engine_unlock();
    RETURN(result);
}

CUresult cuGraphDestroy(CUgraph handle) {
    DRIVER_CALL;
    engine_lock();
    struct graph *graph = pool_check(&graphs, handle);
    if (graph) {
        free(graph->nodes.node);
        pool_return(&graphs, graph);
    }
    engine_unlock();
    RETURN(graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
    DRIVER_CALL;
    engine_lock();
    struct graph_exec *exec = pool_check(&execs, handle);
    if (exec && exec->destroyed) exec = NULL;
    if (exec) {
        exec->destroyed = true;
        exec->launched++;
        graph_exec_release(exec);
    }
    engine_unlock();
    RETURN(exec ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

static CUresult launch_graph(CUgraphExec handle, CUstream stream_handle, bool per_thread, uint64_t correlation) {
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(stream_handle, per_thread, &stream);
    struct graph_exec *exec = result ? NULL : pool_check(&execs, handle);
    if (!result && (!exec || exec->destroyed)) result = CUDA_ERROR_INVALID_VALUE;
    if (!result) {
        int64_t duration_ns = 0;
        double factor = fault_active(settings.slow_rank) ? settings.slow_factor : 1;
        for (uint32_t i = 0; i < exec->nodes.count; i++) {
            const struct node *node = &exec->nodes.node[i];
            duration_ns += (int64_t)((double)node->duration_ns * (node->kind == OP_KERNEL ? factor : 1));
        }
        duration_ns = (int64_t)((double)duration_ns * engine_jitter());
        exec->launched++;
        result = stream_submit(stream, &(struct op){.kind = OP_GRAPH, .name = "graph", .correlation = correlation,
                                                    .duration_ns = duration_ns, .graph = exec});
        if (result) graph_exec_release(exec);
    }
    engine_unlock();
    return result;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    DRIVER_CALL;
    RETURN(launch_graph(exec, stream, false, CORRELATION));
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
    DRIVER_CALL;
    RETURN(launch_graph(exec, stream, true, CORRELATION));
}
