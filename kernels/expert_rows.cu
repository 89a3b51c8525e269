// Decode rows times expert weights that lie in slot records, and the weighted sum of their outputs.
//
// Macros, one module per combination:
//   DTYPE       0 bfloat16, 1 float16, 2 float32
//   GATE        0 none, 1 [gate; up] one after the other, 2 gate and up interleaved
//   ACTIVATION  0 none, 1 silu, 2 gelu (tanh), 3 relu squared, 4 clamped swiglu
//   TRANSPOSED  0 weights are [out, in], 1 weights are [in, out]
//   TASK_BYTES  sizeof(Task) as the host sees it
//
// A step reads each chosen expert's weights from device memory once, however many rows chose it: one block owns a tile
// of outputs of one expert and serves all its rows. A row's products are added in an order that depends on nothing but
// the shape, so its bits depend neither on its companions nor on which experts were computed in the same launch.
// Sums are float32; values are rounded to the element type where the plain-torch twin rounds them.

#ifndef DTYPE
#define DTYPE 0
#endif
#ifndef GATE
#define GATE 1
#endif
#ifndef ACTIVATION
#define ACTIVATION 1
#endif
#ifndef TRANSPOSED
#define TRANSPOSED 0
#endif

#define MAX_PAIRS 384
#define ALL_LANES 0xffffffffu

#if DTYPE == 2
typedef float Element;
#define VEC 4
#else
typedef unsigned short Element;
#define VEC 8
#endif

// Which pairs (row * top_k + rank) chose which slot: pair[start[g]] .. pair[start[g + 1] - 1] chose slot[g].
struct Words {
    int num_groups;
    int slot[MAX_PAIRS];
    unsigned short start[MAX_PAIRS + 1];
    unsigned short pair[MAX_PAIRS];
};

struct Task {
    const char* weights;        // the part in slot 0
    const char* biases;         // the part in slot 0, or null
    const Element* x;           // [pairs / row_divisor, inner]
    Element* out;               // [pairs, num_outputs]
    const Words* words_device;  // null: the words of this argument
    long long record_bytes;
    int inner;
    int num_outputs;            // after the gate
    int row_divisor;            // top_k: pairs of a row share it; 1: every pair has a row of its own
    float limit;
    float alpha;
    Words words;
};

#ifdef TASK_BYTES
static_assert(sizeof(Task) == TASK_BYTES, "the host's Task differs from the device's");
#endif

__device__ __forceinline__ float to_float(Element value) {
#if DTYPE == 2
    return value;
#elif DTYPE == 1
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
    return out;
#else
    return __uint_as_float((unsigned int)value << 16);
#endif
}

__device__ __forceinline__ Element from_float(float value) {
#if DTYPE == 2
    return value;
#else
    Element out;
#if DTYPE == 1
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
#endif
    return out;
#endif
}

__device__ __forceinline__ float rounded(float value) { return to_float(from_float(value)); }

__device__ __forceinline__ void unpack(const uint4& packed, float (&out)[VEC]) {
    const unsigned int words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if DTYPE == 2
        out[i] = __uint_as_float(words[i]);
#elif DTYPE == 1
        out[2 * i] = to_float((Element)(words[i] & 0xffffu));
        out[2 * i + 1] = to_float((Element)(words[i] >> 16));
#else
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#endif
    }
}

// Weights pass through once: they must not push the rows, which every warp reads, out of the first-level cache.
__device__ __forceinline__ uint4 load_weights(const Element* address) {
    uint4 out;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
        : "l"(address));
    return out;
}

__device__ __forceinline__ uint4 load_row(const Element* address) {
    return __ldg(reinterpret_cast<const uint4*>(address));
}

// The weight row of an output: half 0 is its gate (or the output itself), half 1 its up.
template <int GATED>
__device__ __forceinline__ int feature_of(int output, int half, int num_outputs) {
    return GATED == 0 ? output : GATED == 1 ? output + half * num_outputs : 2 * output + half;
}

// Comparisons, not fminf and fmaxf, so that NaN stays NaN.
template <int KIND>
__device__ __forceinline__ float activated(float v, float limit, float alpha) {
    if (KIND == 1) return rounded(v / (1.0f + expf(-v)));
    if (KIND == 2) {
        const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
        return rounded(0.5f * v * (1.0f + tanhf(inner)));
    }
    if (KIND == 3) {
        const float positive = v <= 0.0f ? 0.0f : v;
        return rounded(positive * positive);
    }
    if (KIND == 4) {
        const float gate = v > limit ? limit : v;
        const float sigmoid = rounded(1.0f / (1.0f + expf(-rounded(gate * alpha))));
        return rounded(gate * sigmoid);
    }
    return v;
}

template <int GATED, int KIND>
__device__ __forceinline__ Element finish(const Task& task, int slot, int output, float first, float second) {
    const Element* bias = reinterpret_cast<const Element*>(task.biases + (long long)slot * task.record_bytes);
    const bool is_biased = task.biases != nullptr;
    first = rounded(first);
    if (is_biased) first = rounded(first + to_float(bias[feature_of<GATED>(output, 0, task.num_outputs)]));
    const float gate = activated<KIND>(first, task.limit, task.alpha);
    if (GATED == 0) return from_float(gate);
    second = rounded(second);
    if (is_biased) second = rounded(second + to_float(bias[feature_of<GATED>(output, 1, task.num_outputs)]));
    if (KIND == 4) {
        second = second > task.limit ? task.limit : second < -task.limit ? -task.limit : second;
        second = rounded(second + 1.0f);
    }
    return from_float(gate * second);
}

#if TRANSPOSED == 0

#define THREADS 128
#define WARP_FEATURES 4  // weight rows of a warp: that many 16-byte loads per lane and unrolled step are in flight

// A warp owns four weight rows; its lanes stride along them and meet in a butterfly.
template <int ROWS, int GATED, int KIND>
__device__ __forceinline__ void multiply(const Task& task) {
    constexpr int HALVES = GATED ? 2 : 1;
    constexpr int OUTPUTS = WARP_FEATURES / HALVES;
    constexpr int UNROLL = ROWS <= 2 ? 2 : 1;  // more rows need the registers for their sums
    constexpr int STRIDE = 32 * VEC;
    const Words& words = task.words_device != nullptr ? *task.words_device : task.words;
    const int group = blockIdx.y;
    const int lane = threadIdx.x & 31;
    const int first_output = (blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5)) * OUTPUTS;
    if (group >= words.num_groups || first_output >= task.num_outputs) return;
    const int slot = words.slot[group];
    const Element* record = reinterpret_cast<const Element*>(task.weights + (long long)slot * task.record_bytes);
    const Element* weights[WARP_FEATURES];
#pragma unroll
    for (int i = 0; i < WARP_FEATURES; ++i) {
        const int output = min(first_output + i / HALVES, task.num_outputs - 1);
        weights[i] = record + (long long)feature_of<GATED>(output, i % HALVES, task.num_outputs) * task.inner;
    }
    const int end = words.start[group + 1];
    for (int begin = words.start[group]; begin < end; begin += ROWS) {
        const Element* x[ROWS];
        float sums[ROWS][WARP_FEATURES];
#pragma unroll
        for (int n = 0; n < ROWS; ++n) {
            const int row = words.pair[min(begin + n, end - 1)] / task.row_divisor;
            x[n] = task.x + (long long)row * task.inner;
#pragma unroll
            for (int i = 0; i < WARP_FEATURES; ++i) sums[n][i] = 0.0f;
        }
        for (int k = lane * VEC; k < task.inner; k += STRIDE * UNROLL) {
            uint4 loaded[UNROLL][WARP_FEATURES];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
#pragma unroll
                for (int i = 0; i < WARP_FEATURES; ++i)
                    loaded[u][i] = k + u * STRIDE < task.inner ? load_weights(weights[i] + k + u * STRIDE)
                                                               : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                float w[WARP_FEATURES][VEC];
#pragma unroll
                for (int i = 0; i < WARP_FEATURES; ++i) unpack(loaded[u][i], w[i]);
#pragma unroll
                for (int n = 0; n < ROWS; ++n) {
                    float values[VEC];
                    unpack(k + u * STRIDE < task.inner ? load_row(x[n] + k + u * STRIDE) : make_uint4(0, 0, 0, 0), values);
#pragma unroll
                    for (int e = 0; e < VEC; ++e)
#pragma unroll
                        for (int i = 0; i < WARP_FEATURES; ++i) sums[n][i] = fmaf(w[i][e], values[e], sums[n][i]);
                }
            }
        }
        float first = 0.0f, second = 0.0f;
#pragma unroll
        for (int n = 0; n < ROWS; ++n)
#pragma unroll
            for (int i = 0; i < WARP_FEATURES; ++i) {
                float sum = sums[n][i];
#pragma unroll
                for (int mask = 16; mask > 0; mask >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
                if (lane == n * OUTPUTS + i / HALVES) (i % HALVES ? second : first) = sum;
            }
        const int n = lane / OUTPUTS, output = first_output + lane % OUTPUTS;
        if (n < ROWS && begin + n < end && output < task.num_outputs)
            task.out[(long long)words.pair[begin + n] * task.num_outputs + output] =
                finish<GATED, KIND>(task, slot, output, first, second);
    }
}

#else

#define THREADS 256
#define COLUMN_LANES 8  // neighbouring threads, 128 bytes of one weight row; the others take other weight rows
#define SLICES (THREADS / COLUMN_LANES)

// A block owns a tile of columns; a thread sums its vector of columns over every 32nd weight row, then slices meet.
template <int ROWS, int GATED, int KIND>
__device__ __forceinline__ void multiply(const Task& task) {
    constexpr int STREAMS = GATED == 1 ? 2 : 1;  // gate and up columns lie apart
    constexpr int UNROLL = STREAMS == 1 ? 4 : 2;
    constexpr int TILE = COLUMN_LANES * VEC;
    constexpr int OUTPUTS = GATED == 2 ? TILE / 2 : TILE;
    __shared__ float partial[THREADS / 32][ROWS][STREAMS][TILE];
    const Words& words = task.words_device != nullptr ? *task.words_device : task.words;
    const int group = blockIdx.y;
    if (group >= words.num_groups) return;  // the whole block
    const int slot = words.slot[group];
    const Element* record = reinterpret_cast<const Element*>(task.weights + (long long)slot * task.record_bytes);
    const int width = GATED ? 2 * task.num_outputs : task.num_outputs;
    const int column = blockIdx.x * TILE + (threadIdx.x % COLUMN_LANES) * VEC;
    const bool is_inside = column < width / STREAMS;
    const int slice = threadIdx.x / COLUMN_LANES;
    const int end = words.start[group + 1];
    for (int begin = words.start[group]; begin < end; begin += ROWS) {
        const Element* x[ROWS];
        float sums[ROWS][STREAMS][VEC];
#pragma unroll
        for (int n = 0; n < ROWS; ++n) {
            const int row = words.pair[min(begin + n, end - 1)] / task.row_divisor;
            x[n] = task.x + (long long)row * task.inner;
#pragma unroll
            for (int s = 0; s < STREAMS; ++s)
#pragma unroll
                for (int e = 0; e < VEC; ++e) sums[n][s][e] = 0.0f;
        }
        for (int k = slice; k < task.inner; k += SLICES * UNROLL) {
            uint4 loaded[UNROLL][STREAMS];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
#pragma unroll
                for (int s = 0; s < STREAMS; ++s) {
                    const int row = k + u * SLICES;
                    loaded[u][s] = is_inside && row < task.inner
                                       ? load_weights(record + (long long)row * width + s * task.num_outputs + column)
                                       : make_uint4(0, 0, 0, 0);
                }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                float w[STREAMS][VEC];
#pragma unroll
                for (int s = 0; s < STREAMS; ++s) unpack(loaded[u][s], w[s]);
#pragma unroll
                for (int n = 0; n < ROWS; ++n) {
                    const int row = k + u * SLICES;
                    const float value = row < task.inner ? to_float(__ldg(x[n] + row)) : 0.0f;
#pragma unroll
                    for (int s = 0; s < STREAMS; ++s)
#pragma unroll
                        for (int e = 0; e < VEC; ++e) sums[n][s][e] = fmaf(w[s][e], value, sums[n][s][e]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < ROWS; ++n)
#pragma unroll
            for (int s = 0; s < STREAMS; ++s)
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    float sum = sums[n][s][e];
#pragma unroll
                    for (int mask = COLUMN_LANES; mask < 32; mask <<= 1) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
                    if ((threadIdx.x & 31) < COLUMN_LANES)
                        partial[threadIdx.x >> 5][n][s][(threadIdx.x % COLUMN_LANES) * VEC + e] = sum;
                }
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * OUTPUTS; i += THREADS) {
            const int n = i / OUTPUTS, local = i % OUTPUTS, output = blockIdx.x * OUTPUTS + local;
            if (begin + n >= end || output >= task.num_outputs) continue;
            float first = 0.0f, second = 0.0f;
            for (int warp = 0; warp < THREADS / 32; ++warp) {
                first += partial[warp][n][0][GATED == 2 ? 2 * local : local];
                if (GATED) second += GATED == 2 ? partial[warp][n][0][2 * local + 1] : partial[warp][n][STREAMS - 1][local];
            }
            task.out[(long long)words.pair[begin + n] * task.num_outputs + output] =
                finish<GATED, KIND>(task, slot, output, first, second);
        }
        __syncthreads();  // the next rows write `partial` again
    }
}

#endif

// __grid_constant__: the words are read where the launch put them; without it every thread would copy them.
#define ENTRY(name, rows, gate, activation)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Task task) {  \
        multiply<rows, gate, activation>(task);                                                      \
    }

ENTRY(up_1, 1, GATE, ACTIVATION)
ENTRY(up_2, 2, GATE, ACTIVATION)
ENTRY(up_4, 4, GATE, ACTIVATION)
ENTRY(down_1, 1, 0, 0)
ENTRY(down_2, 2, 0, 0)
ENTRY(down_4, 4, 0, 0)
#if TRANSPOSED == 0
ENTRY(up_8, 8, GATE, ACTIVATION)
ENTRY(down_8, 8, 0, 0)
#endif

struct Combine {
    const Element* pair_outputs;  // [rows * top_k, num_outputs]
    const void* topk_weights;     // [rows, top_k], float32 or Element
    Element* out;                 // [rows, num_outputs]
    int top_k;
    int num_outputs;
    int is_float;
};

// Ranks are added in the router's order, product and sum rounded apart as the plain-torch twin does; cast last.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Combine task) {
    const int output = (blockIdx.x * 128 + threadIdx.x) * VEC;
    const long long row = blockIdx.y;
    if (output >= task.num_outputs) return;
    float sums[VEC];
#pragma unroll
    for (int e = 0; e < VEC; ++e) sums[e] = 0.0f;
    for (int rank = 0; rank < task.top_k; ++rank) {
        const long long pair = row * task.top_k + rank;
        const float weight = task.is_float ? static_cast<const float*>(task.topk_weights)[pair]
                                           : to_float(static_cast<const Element*>(task.topk_weights)[pair]);
        float values[VEC];
        unpack(load_row(task.pair_outputs + pair * task.num_outputs + output), values);
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            const float weighted = __fmul_rn(values[e], weight);
            sums[e] = __fadd_rn(sums[e], task.is_float ? weighted : rounded(weighted));
        }
    }
#pragma unroll
    for (int e = 0; e < VEC; ++e) task.out[row * task.num_outputs + output + e] = from_float(sums[e]);
}
