// Kernels of training and sampling on a processor. verl/platform/cpu_kernels.py builds and calls them.
//
// Numbers are float32 or bfloat16 in memory (`kind` 0 or 1), float32 in between, and rounded once when they are written.
// Every row is computed by one thread in one order: the number of threads changes no result.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float V __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));
typedef uint16_t H __attribute__((vector_size(W * 2)));
struct bf16 {
    uint16_t bits;
};
using Size = int64_t;

// A load of a vector that crosses a line of the cache takes twice as long.
constexpr std::align_val_t LINE{64};
template <class X> struct OnLines {
    using value_type = X;
    OnLines() = default;
    template <class Y> OnLines(const OnLines<Y>&) {}
    X* allocate(size_t n) { return (X*)operator new(n * sizeof(X), LINE); }
    void deallocate(X* p, size_t) { operator delete(p, LINE); }
    bool operator==(const OnLines&) const { return true; }
    bool operator!=(const OnLines&) const { return false; }
};
using Floats = std::vector<float, OnLines<float>>;
// Keeps a value in a register where the compiler would load it anew in each instruction that uses it.
#if defined(__AVX512F__)
#define HOLD(v) asm("" : "+v"(v))
#elif defined(__AVX__)
#define HOLD(v) asm("" : "+x"(v))
#else
#define HOLD(v)
#endif

#define INLINE __attribute__((always_inline)) static inline
#define PRAGMA(words) _Pragma(#words)
#define PARALLEL(work) PRAGMA(omp parallel for num_threads(threads) if (threads > 1 && (work) > 32768))
#define DYNAMIC PRAGMA(omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1))
#define KIND(kind, T, ...)  \
    if (kind) {             \
        using T = bf16;     \
        __VA_ARGS__;        \
    } else {                \
        using T = float;    \
        __VA_ARGS__;        \
    }

static inline V all(float x) { return x - V{}; }
static inline V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline V load(const bf16* p) {
#if defined(__AVX512F__)
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    H h;
    memcpy(&h, p, sizeof h);
    return (V)(__builtin_convertvector(h, U) << 16);
#endif
}
static inline void store(float* p, V v) { memcpy(p, &v, sizeof v); }
static inline void store(bf16* p, V v) {
#if defined(__AVX512BF16__)
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
    U u = (U)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    rounded = (v == v) ? rounded : U{} + 0x7fc0;
    H h = __builtin_convertvector(rounded, H);
#endif
    memcpy(p, &h, W * 2);
}
template <class T> static inline V load(const T* p, int n) {
    if (n == W) return load(p);
    T part[W] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T> static inline void store(T* p, V v, int n) {
    if (n == W) return store(p, v);
    T part[W];
    store(part, v);
    memcpy(p, part, n * sizeof(T));
}
static inline float number(float x) { return x; }
static inline float number(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
// f(first, how many) of each vector of a row
template <class F> static inline void each(Size width, F f) {
    Size d = 0;
    for (; d + W <= width; d += W) f(d, W);
    if (d < width) f(d, int(width - d));
}
static inline float sum(V v) {
    float part[W];
    memcpy(part, &v, sizeof v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}
static inline V most(V a, V b) { return (a > b) ? a : b; }
static inline float largest(V v) {
    float part[W];
    memcpy(part, &v, sizeof v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = std::max(part[i], part[i + half]);
    return part[0];
}
// e^x to about one unit in the last place; 0 below -87.3, where e^x has no full precision; not a number stays so
static inline V exponential(V x) {
    V y = (x > all(88.f)) ? all(88.f) : x;
    V n = y * 1.44269504f + 12582912.f;
    I k = (I)n - 0x4B400000;
    n -= 12582912.f;
    V r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    return (x < all(-87.3f)) ? V{} : p * (V)((k + 127) << 23);
}
static inline V sigmoid(V x) {
    V y = 1.f + exponential(-x);
#if defined(__AVX512F__)
    V r = (V)_mm512_rcp14_ps((__m512)y);  // 14 bits, 28 after a step of Newton's
    return r * (2.f - y * r);
#else
    return 1.f / y;
#endif
}
// The sums of W vectors, as one: neighbours are added pairwise, block by block of S lanes
#if defined(__clang__)
#define SHUFFLE(a, b, from) shuffled(a, b, from)
static inline V shuffled(V a, V b, I from) {
    V v;
    for (int i = 0; i < W; i++) v[i] = from[i] < W ? a[from[i]] : b[from[i] - W];
    return v;
}
#else
#define SHUFFLE(a, b, from) __builtin_shuffle(a, b, from)
#endif
template <int S> INLINE void exchange(V& a, V& b) {  // blocks of `a` with an odd number, and of `b` with an even one
    I low, high;
    for (int i = 0; i < W; i++) {
        low[i] = i / S % 2 ? W + i - S : i;
        high[i] = i / S % 2 ? W + i : i + S;
    }
    V first = SHUFFLE(a, b, low);
    b = SHUFFLE(a, b, high);
    a = first;
}
template <int S> INLINE V pair(V a, V b) {
    exchange<S>(a, b);
    return a + b;
}
template <int S> INLINE V sums(const V* v) {
    if constexpr (S == 1)
        return v[0];
    else
        return pair<S / 2>(sums<S / 2>(v), sums<S / 2>(v + S / 2));
}
// The lanes of W vectors become the vectors
template <int S = W / 2> INLINE void transpose(V* v) {
    if constexpr (S > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            if (!(i & S)) exchange<S>(v[i], v[i + S]);
        transpose<S / 2>(v);
    }
}
// n numbers, the rest of the vector `rest`
static inline V filled(V v, int n, float rest) {
    for (int i = n; i < W; i++) v[i] = rest;
    return v;
}

// ---- normalisation: x [rows / parts, parts, width] of any steps

template <class X, class Y>
static inline float rms_norm_row(const X* x, const float* weight, Y* y, Size width, float eps, float offset) {
    V squares{};
    each(width, [&](Size d, int n) {
        V v = load(x + d, n);
        squares += v * v;
    });
    float factor = 1.f / std::sqrt(sum(squares) / width + eps);
    each(width, [&](Size d, int n) { store(y + d, load(x + d, n) * factor * (load(weight + d, n) + offset), n); });
    return factor;
}
template <class X, class Y>
static void rms_norm_rows(const X* x, const float* weight, Y* y, float* inverse, Size rows, Size parts, Size row_step,
                          Size part_step, Size width, float eps, float offset, int threads) {
    PARALLEL(rows * width)
    for (Size row = 0; row < rows; row++) {
        const X* in = x + row / parts * row_step + row % parts * part_step;
        inverse[row] = rms_norm_row(in, weight, y + row * width, width, eps, offset);
    }
}
extern "C" void rms_norm(const void* x, const float* weight, void* y, float* inverse, Size rows, Size parts,
                         Size row_step, Size part_step, Size width, float eps, float offset, int x_kind, int y_kind,
                         int threads) {
    KIND(x_kind, X, KIND(y_kind, Y, rms_norm_rows((const X*)x, weight, (Y*)y, inverse, rows, parts, row_step, part_step,
                                                  width, eps, offset, threads)))
}

template <class X, class Y>
static void rms_norm_gradients(const Y* grad, const X* x, const float* weight, const float* inverse, X* dx, float* dw,
                               Size rows, Size parts, Size row_step, Size part_step, Size width, float offset,
                               Size blocks, int threads) {
    // dw [blocks, width]: the sum over a block of rows
    PARALLEL(rows * width)
    for (Size block = 0; block < blocks; block++) {
        float* total = dw + block * width;
        for (Size row = rows * block / blocks; row < rows * (block + 1) / blocks; row++) {
            const X* in = x + row / parts * row_step + row % parts * part_step;
            const Y* g = grad + row * width;
            V along{};
            each(width, [&](Size d, int n) {
                V product = load(g + d, n) * load(in + d, n);
                along += product * (load(weight + d, n) + offset);
                store(total + d, load(total + d, n) + product * inverse[row], n);
            });
            float factor = inverse[row], share = sum(along) * factor * factor * factor / width;
            each(width, [&](Size d, int n) {
                V scaled = load(g + d, n) * (load(weight + d, n) + offset);
                store(dx + row * width + d, scaled * factor - load(in + d, n) * share, n);
            });
        }
    }
}
extern "C" void rms_norm_backward(const void* grad, const void* x, const float* weight, const float* inverse, void* dx,
                                  float* dw, Size rows, Size parts, Size row_step, Size part_step, Size width,
                                  float offset, Size blocks, int x_kind, int y_kind, int threads) {
    KIND(x_kind, X, KIND(y_kind, Y, rms_norm_gradients((const Y*)grad, (const X*)x, weight, inverse, (X*)dx, dw, rows,
                                                       parts, row_step, part_step, width, offset, blocks, threads)))
}

// sum = x + delta, all [rows, width], and its norm y, if wanted
template <class X, class Y>
static void add_norm_rows(const X* x, const Y* delta, X* sum, const float* weight, Y* y, Size rows, Size width, float eps,
                          float offset, int threads) {
    PARALLEL(rows * width)
    for (Size row = 0; row < rows; row++) {
        Size at = row * width;
        each(width, [&](Size d, int n) { store(sum + at + d, load(x + at + d, n) + load(delta + at + d, n), n); });
        if (y) rms_norm_row(sum + at, weight, y + at, width, eps, offset);
    }
}
extern "C" void add_norm(const void* x, const void* delta, void* sum, const float* weight, void* y, Size rows, Size width,
                         float eps, float offset, int x_kind, int y_kind, int threads) {
    KIND(x_kind, X, KIND(y_kind, Y, add_norm_rows((const X*)x, (const Y*)delta, (X*)sum, weight, (Y*)y, rows, width, eps,
                                                  offset, threads)))
}

// ---- gated MLP

template <class T>
static void swiglu_rows(const T* gate, const T* up, T* out, Size rows, Size gate_step, Size up_step, Size width,
                        int threads) {
    PARALLEL(rows * width)
    for (Size row = 0; row < rows; row++)
        each(width, [&](Size d, int n) {
            V g = load(gate + row * gate_step + d, n);
            store(out + row * width + d, g * sigmoid(g) * load(up + row * up_step + d, n), n);
        });
}
extern "C" void swiglu(const void* gate, const void* up, void* out, Size rows, Size gate_step, Size up_step, Size width,
                       int kind, int threads) {
    KIND(kind, T, swiglu_rows((const T*)gate, (const T*)up, (T*)out, rows, gate_step, up_step, width, threads))
}

template <class T>
static void swiglu_gradients(const T* grad, const T* gate, const T* up, T* out, T* dgate, T* dup, Size rows, Size width,
                             int threads) {
    PARALLEL(rows * width)
    for (Size row = 0; row < rows; row++)
        each(width, [&](Size column, int n) {
            Size at = row * width + column;
            V d = load(grad + at, n), g = load(gate + at, n), u = load(up + at, n);
            V s = sigmoid(g), silu = g * s;
            store(out + at, silu * u, n);
            store(dgate + at, d * u * (s + silu * (1.f - s)), n);
            store(dup + at, d * silu, n);
        });
}
extern "C" void swiglu_backward(const void* grad, const void* gate, const void* up, void* out, void* dgate, void* dup,
                                Size rows, Size width, int kind, int threads) {
    KIND(kind, T, swiglu_gradients((const T*)grad, (const T*)gate, (const T*)up, (T*)out, (T*)dgate, (T*)dup, rows,
                                   width, threads))
}

// ---- rotation: x of steps (head, token, 1) → [tokens, heads, 2 half]; cos and sin [tokens, 2 half]

template <class X, class Y>
static inline void rotate_row(const X* x, const float* cos, const float* sin, Y* out, Size half, bool back) {
    each(half, [&](Size d, int n) {
        V a = load(x + d, n), b = load(x + half + d, n);
        V c1 = load(cos + d, n), c2 = load(cos + half + d, n), s1 = load(sin + d, n), s2 = load(sin + half + d, n);
        store(out + d, back ? a * c1 + b * s2 : a * c1 - b * s1, n);
        store(out + half + d, back ? b * c2 - a * s1 : b * c2 + a * s2, n);
    });
}
template <class X, class Y>
static void rotate_heads(const X* x, const float* cos, const float* sin, Y* out, Size tokens, Size heads, Size half,
                         Size head_step, Size token_step, bool back, int threads) {
    PARALLEL(tokens * heads * half)
    for (Size token = 0; token < tokens; token++)
        for (Size head = 0; head < heads; head++)
            rotate_row(x + token * token_step + head * head_step, cos + token * 2 * half, sin + token * 2 * half,
                       out + (token * heads + head) * 2 * half, half, back);
}
extern "C" void rotate(const void* x, const float* cos, const float* sin, void* out, Size tokens, Size heads, Size half,
                       Size head_step, Size token_step, int back, int x_kind, int y_kind, int threads) {
    KIND(x_kind, X, KIND(y_kind, Y, rotate_heads((const X*)x, cos, sin, (Y*)out, tokens, heads, half, head_step,
                                                 token_step, back, threads)))
}

// x [tokens, step], of which each row begins with `heads` heads: in place, each is normed by its weight (`own` heads by
// the first one, the others by the second; null: none) and rotated
template <class T>
static void norm_rotate_rows(T* x, const float* weight, const float* other_weight, const float* cos, const float* sin,
                             Size tokens, Size step, Size own, Size heads, Size half, float eps, float offset,
                             int threads) {
    PARALLEL(tokens * heads * half)
    for (Size token = 0; token < tokens; token++)
        for (Size head = 0; head < heads; head++) {
            T* at = x + token * step + head * 2 * half;
            const float* w = head < own ? weight : other_weight;
            if (w) rms_norm_row(at, w, at, 2 * half, eps, offset);
            rotate_row(at, cos + token * 2 * half, sin + token * 2 * half, at, half, false);
        }
}
extern "C" void norm_rotate(void* x, const float* weight, const float* other_weight, const float* cos, const float* sin,
                            Size tokens, Size step, Size own, Size heads, Size half, float eps, float offset, int kind,
                            int threads) {
    KIND(kind, T, norm_rotate_rows((T*)x, weight, other_weight, cos, sin, tokens, step, own, heads, half, eps, offset,
                                   threads))
}

// ---- head: rows of a block of logits z [rows, columns]; see cuda_kernels.py

template <class T>
static void head_forward_rows(const T* z, const Size* targets, float* state, float* picked, Size rows, Size columns,
                              Size start, Size wanted, bool entropy, bool squares, int threads) {
    PARALLEL(rows * columns)
    for (Size row = 0; row < rows; row++) {
        const T* in = z + row * columns;
        V peak = all(-INFINITY);
        each(columns, [&](Size d, int n) { peak = most(filled(load(in + d, n), n, -INFINITY), peak); });
        float before = state[row], total = state[rows + row], top = std::max(before, largest(peak));
        V sums{}, weighted{}, twice{};
        each(columns, [&](Size d, int n) {
            V centred = load(in + d, n) - top, e = filled(exponential(centred), n, 0.f);
            sums += e;
            if (entropy) weighted += e * filled(centred, n, 0.f);
            if (squares) twice += e * e;
        });
        float shrink = std::exp(before - top);
        if (entropy) {
            float moved = total > 0 ? (before - top) * total : 0.f;
            state[2 * rows + row] = (state[2 * rows + row] + moved) * shrink + sum(weighted);
        }
        if (squares) state[3 * rows + row] = state[3 * rows + row] * shrink * shrink + sum(twice);
        state[rows + row] = total * shrink + sum(sums);
        state[row] = top;
        for (Size k = 0; k < wanted; k++) {
            Size target = targets[row * wanted + k] - start;
            if (target >= 0 && target < columns) picked[row * wanted + k] = number(in[target]);
        }
    }
}
extern "C" void head_forward(const void* z, const Size* targets, float* state, float* picked, Size rows, Size columns,
                             Size start, Size wanted, int entropy, int squares, int kind, int threads) {
    KIND(kind, T, head_forward_rows((const T*)z, targets, state, picked, rows, columns, start, wanted, entropy, squares,
                                    threads))
}

template <class T>
static void head_gradients(T* z, const float* stats, Size stats_step, const Size* targets, const float* grad,
                           const float* g_entropy, const float* g_squares, Size rows, Size columns, Size start,
                           Size wanted, int threads) {
    PARALLEL(rows * columns)
    for (Size row = 0; row < rows; row++) {
        T* at = z + row * columns;
        float lse = stats[row], entropy = stats[stats_step + row], squares = stats[2 * stats_step + row], g = 0.f;
        Floats chosen(wanted);
        for (Size k = 0; k < wanted; k++) {
            Size target = targets[row * wanted + k] - start;
            g -= grad[row * wanted + k];
            chosen[k] = target >= 0 && target < columns ? number(at[target]) : 0.f;
        }
        each(columns, [&](Size d, int n) {
            V log_pi = load(at + d, n) - lse, pi = exponential(log_pi), factor = all(g);
            if (g_entropy) factor -= g_entropy[row] * (log_pi + entropy);
            if (g_squares) factor += 2.f * g_squares[row] * (pi - squares);
            store(at + d, pi * factor, n);
        });
        for (Size k = 0; k < wanted; k++) {  // the gradient of a target, and of one named again
            Size target = targets[row * wanted + k] - start;
            if (target < 0 || target >= columns) continue;
            float log_pi = chosen[k] - lse, pi = std::exp(log_pi), factor = g, own = 0.f;
            if (g_entropy) factor -= g_entropy[row] * (log_pi + entropy);
            if (g_squares) factor += 2.f * g_squares[row] * (pi - squares);
            for (Size other = 0; other < wanted; other++)
                if (targets[row * wanted + other] == targets[row * wanted + k]) own += grad[row * wanted + other];
            T last[W];
            store(last, all(pi * factor + own));
            at[target] = last[0];
        }
    }
}
extern "C" void head_backward(void* z, const float* stats, Size stats_step, const Size* targets, const float* grad,
                              const float* g_entropy, const float* g_squares, Size rows, Size columns, Size start,
                              Size wanted, int kind, int threads) {
    KIND(kind, T, head_gradients((T*)z, stats, stats_step, targets, grad, g_entropy, g_squares, rows, columns, start,
                                 wanted, threads))
}

// ---- drawing: the inverse of the cumulative distribution of softmax(z) [rows, columns], and the log-prob of the token

extern "C" void draw(const float* z, const double* uniform, Size* tokens, float* log_probs, Size rows, Size columns,
                     int threads) {
    constexpr Size CHUNK = 64;
    PARALLEL(rows * columns)
    for (Size row = 0; row < rows; row++) {
        const float* in = z + row * columns;
        V peak = all(-INFINITY);
        each(columns, [&](Size d, int n) { peak = most(filled(load(in + d, n), n, -INFINITY), peak); });
        float top = largest(peak);
        std::vector<double> sums((columns + CHUNK - 1) / CHUNK);
        auto weights = [&](Size chunk, float* e) {
            Size first = chunk * CHUNK, count = std::min(CHUNK, columns - first);
            each(count, [&](Size d, int n) { store(e + d, exponential(load(in + first + d, n) - top), n); });
            return count;
        };
        double total = 0;
        float e[CHUNK];
        for (Size chunk = 0; chunk < Size(sums.size()); chunk++) {
            Size count = weights(chunk, e);
            V part{};
            each(count, [&](Size d, int n) { part += load(e + d, n); });
            sums[chunk] = total += sum(part);
        }
        if (uniform[row] < 0) {
            Size best = 0;
            while (best + 1 < columns && in[best] != top) best++;
            tokens[row] = best;
            log_probs[row] = float(in[best] - top - std::log(total));
            continue;
        }
        double target = uniform[row] * total;
        // the first sum above the target: neither a chunk nor a token of probability 0 is ever taken
        Size chunk = std::upper_bound(sums.begin(), sums.end(), target) - sums.begin();
        chunk = std::min<Size>(chunk, sums.size() - 1);
        double before = chunk ? sums[chunk - 1] : 0, running = 0;
        Size count = weights(chunk, e), token = -1, last = 0;
        for (Size i = 0; i < count; i++) {
            running += e[i];
            if (e[i] > 0) last = i;
            if (token < 0 && before + running > target) token = i;
        }
        tokens[row] = chunk * CHUNK + (token < 0 ? last : token);
        log_probs[row] = float(in[tokens[row]] - top - std::log(total));
    }
}

// ---- attention of a decode step over the blocks of the cache

// Blocks of keys and values have whole vectors of rows: those past `count` are read, and what comes of them is left out.
template <class T> static const float* widened(const T* rows, Size numbers, Floats& room) {
    if constexpr (sizeof(T) == 4) return rows;
    if (Size(room.size()) < numbers) room.resize(numbers);
    for (Size i = 0; i < numbers; i += W) store(room.data() + i, load(rows + i));
    return room.data();
}
// Blocks lie apart, where no processor looks ahead.
template <class T> static inline void prefetch(const T* from, Size numbers) {
    for (const char *at = (const char*)from, *end = (const char*)(from + numbers); at < end; at += 64)
        __builtin_prefetch(at);
}
// q [queries, width], keys [count, width] → scores [queries][step]
template <int N>
static void key_scores(const float* q, Size queries, const float* keys, Size count, Size width, float scale,
                       float* scores, Size step) {
    for (Size j = 0; j < count; j += W)
        for (Size i = 0; i < queries; i++) {
            V dots[W] = {};
            const float *query = q + i * width, *key = keys + j * width;
            if constexpr (N > 0) {
                for (int d = 0; d < N; d++) {
                    V part = load(query + d * W);
#pragma GCC unroll 16
                    for (int r = 0; r < W; r++) dots[r] += part * load(key + r * N * W + d * W);
                }
            } else {
                each(width, [&](Size d, int n) {
                    V part = load(query + d, n);
                    for (int r = 0; r < W; r++) dots[r] += part * load(key + r * width + d, n);
                });
            }
            store(scores + i * step + j, sums<W>(dots) * scale, int(std::min<Size>(W, count - j)));
        }
}
#if defined(__AVX512BF16__)
// The same in bfloat16: each instruction adds products of pairs, which are exact, in float32
template <int N>
static void key_scores(const bf16* q, Size queries, const bf16* keys, Size count, Size, float scale, float* scores,
                       Size step) {
    constexpr Size width = N * W;
    auto pairs = [](const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); };
    for (Size j = 0; j < count; j += W)
        for (Size i = 0; i < queries; i++) {
            V dots[W] = {};
            for (Size d = 0; d < width; d += 2 * W) {
                __m512bh part = pairs(q + i * width + d);
#pragma GCC unroll 16
                for (int r = 0; r < W; r++)
                    dots[r] = (V)_mm512_dpbf16_ps((__m512)dots[r], part, pairs(keys + (j + r) * width + d));
            }
            store(scores + i * step + j, sums<W>(dots) * scale, int(std::min<Size>(W, count - j)));
        }
}
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif
// out [m, width] += a · b [count, width], the element (i, j) of `a` at i·row + j·column
template <int Q, int C, class T>
static inline void product_tile(const float* a, Size row, Size column, const T* b, Size count, Size width, float* out,
                                int n) {
    V acc[Q][C];
    for (int i = 0; i < Q; i++)
        for (int c = 0; c < C; c++) acc[i][c] = load(out + i * width + c * W, n);
    for (Size j = 0; j < count; j++)
        for (int c = 0; c < C; c++) {
            V v = load(b + j * width + c * W, n);
            HOLD(v);
            for (int i = 0; i < Q; i++) acc[i][c] += a[i * row + j * column] * v;
        }
    for (int i = 0; i < Q; i++)
        for (int c = 0; c < C; c++) store(out + i * width + c * W, acc[i][c], n);
}
template <int Q, class T>
static inline Size product_rows(const float* a, Size row, Size column, Size from, Size m, const T* b, Size count,
                                Size width, float* out) {
    for (; from + Q <= m; from += Q) {
        const float* at = a + from * row;
        float* to = out + from * width;
        Size d = 0;
        for (; d + 4 * W <= width; d += 4 * W) product_tile<Q, 4>(at, row, column, b + d, count, width, to + d, W);
        for (; d + W <= width; d += W) product_tile<Q, 1>(at, row, column, b + d, count, width, to + d, W);
        if (d < width) product_tile<Q, 1>(at, row, column, b + d, count, width, to + d, int(width - d));
    }
    return from;
}
template <class T>
static void product(const float* a, Size row, Size column, Size m, const T* b, Size count, Size width, float* out) {
    Size from = product_rows<4>(a, row, column, 0, m, b, count, width, out);
    from = product_rows<2>(a, row, column, from, m, b, count, width, out);
    product_rows<1>(a, row, column, from, m, b, count, width, out);
}

struct Step {  // a decode step; `order`: rows, those of a prompt side by side in tiles of `counts` from `starts` on
    const int32_t *order, *starts, *counts, *lengths, *prompt_lengths, *tables, *prompt_tables;
    Size tiles, blocks, prompt_blocks;  // blocks: the widths of the tables
};

template <int N, class T>
static void decode_tiles(const T* q, const T* k, const T* v, T* keys, T* values, const float* sinks, T* out,
                         const Step& step, Size heads, Size per, Size cols, Size width, Size value_width, Size q_row,
                         Size q_head, Size k_row, Size k_head, Size v_row, Size v_head, float scale, float softcap,
                         Size window, int threads) {
    constexpr bool pairs = PAIRS && N > 0 && sizeof(T) == 2;
    using Q = std::conditional_t<pairs, T, float>;  // type of queries where they meet keys
    DYNAMIC
    for (Size unit = 0; unit < step.tiles * heads; unit++) {
        Size tile = unit / heads, head = unit % heads, count = step.counts[tile];
        const int32_t* rows = step.order + step.starts[tile];
        Size prompt = step.prompt_lengths[rows[0]], longest = 0;
        for (Size r = 0; r < count; r++) longest = std::max<Size>(longest, step.lengths[rows[r]]);
        Size queries = count * per, room = prompt + longest;
        thread_local std::vector<Q, OnLines<Q>> wide_room;
        thread_local Floats sums_room, scores, block_room;
        if (Size(wide_room.size()) < queries * width) wide_room.resize(queries * width);
        sums_room.assign(queries * value_width, 0.f);
        if (Size(scores.size()) < queries * room) scores.resize(queries * room);
        Q* wide = wide_room.data();
        float* sums = sums_room.data();
        for (Size r = 0; r < count; r++)
            for (Size i = 0; i < per; i++) {
                const T* from = q + rows[r] * q_row + (head * per + i) * q_head;
                Q* to = wide + (r * per + i) * width;
                each(width, [&](Size d, int n) { store(to + d, load(from + d, n), n); });
            }
        auto block = [&](const int32_t* table, Size j) { return (Size(table[j / cols]) * heads + head) * cols + j % cols; };
        auto score = [&](const Q* rows_of_q, Size number, const T* block_of_keys, Size visible, float* to) {
            if constexpr (pairs)
                key_scores<N>(rows_of_q, number, block_of_keys, visible, width, scale, to, room);
            else
                key_scores<N>(rows_of_q, number,
                              widened(block_of_keys, std::min(cols, (visible + W - 1) / W * W) * width, block_room),
                              visible, width, scale, to, room);
        };
        const int32_t* shared = step.prompt_tables + tile * step.prompt_blocks;
        for (Size j = 0; j < prompt; j += cols)
            score(wide, queries, keys + block(shared, j) * width, std::min(cols, prompt - j), scores.data() + j);
        for (Size r = 0; r < count; r++) {
            const int32_t* table = step.tables + rows[r] * step.blocks;
            Size length = step.lengths[rows[r]], newest = block(table, length - 1);
            memcpy(keys + newest * width, k + rows[r] * k_row + head * k_head, width * sizeof(T));
            memcpy(values + newest * value_width, v + rows[r] * v_row + head * v_head, value_width * sizeof(T));
            float* own = scores.data() + r * per * room + prompt;
            for (Size j = 0; j < length; j += cols) {
                if (j + cols < length)
                    prefetch(keys + block(table, j + cols) * width, std::min(cols, length - j - cols) * width);
                else if (r + 1 < count)
                    prefetch(keys + block(step.tables + rows[r + 1] * step.blocks, 0) * width,
                             std::min<Size>(cols, step.lengths[rows[r + 1]]) * width);
                prefetch(values + block(table, j) * value_width, std::min(cols, length - j) * value_width);
                score(wide + r * per * width, per, keys + block(table, j) * width, std::min(cols, length - j), own + j);
            }
        }
        Floats totals(queries);
        for (Size i = 0; i < queries; i++) {
            Size all_keys = prompt + step.lengths[rows[i / per]];
            Size first = window ? std::max<Size>(0, all_keys - window) : 0;
            float* s = scores.data() + i * room;
            for (Size j = 0; j < first; j++) s[j] = -INFINITY;
            if (softcap > 0)
                for (Size j = first; j < all_keys; j++) s[j] = softcap * std::tanh(s[j] / softcap);
            V peak = all(-INFINITY), total{};
            each(all_keys, [&](Size d, int n) { peak = most(filled(load(s + d, n), n, -INFINITY), peak); });
            float top = largest(peak), sink = sinks ? sinks[head * per + i % per] : -INFINITY;
            top = std::max(top, sink);
            each(all_keys, [&](Size d, int n) {
                V e = exponential(load(s + d, n) - top);
                store(s + d, e, n);
                total += filled(e, n, 0.f);
            });
            totals[i] = sum(total) + (sinks ? std::exp(sink - top) : 0.f);
        }
        for (Size j = 0; j < prompt; j += cols)
            product(scores.data() + j, room, 1, queries,
                    widened(values + block(shared, j) * value_width, cols * value_width, block_room),
                    std::min(cols, prompt - j), value_width, sums);
        for (Size r = 0; r < count; r++) {
            const int32_t* table = step.tables + rows[r] * step.blocks;
            Size length = step.lengths[rows[r]];
            for (Size j = 0; j < length; j += cols)
                product(scores.data() + r * per * room + prompt + j, room, 1, per,
                        values + block(table, j) * value_width, std::min(cols, length - j), value_width,
                        sums + r * per * value_width);
            for (Size i = 0; i < per; i++) {
                float factor = 1.f / totals[r * per + i];
                T* to = out + (rows[r] * heads * per + head * per + i) * value_width;
                each(value_width, [&](Size d, int n) {
                    store(to + d, load(sums + (r * per + i) * value_width + d, n) * factor, n);
                });
            }
        }
    }
}
extern "C" void decode_attention(const void* q, const void* k, const void* v, void* keys, void* values,
                                 const float* sinks, void* out, const int32_t* order, const int32_t* starts,
                                 const int32_t* counts, const int32_t* lengths, const int32_t* prompt_lengths,
                                 const int32_t* tables, const int32_t* prompt_tables, Size tiles, Size blocks,
                                 Size prompt_blocks, Size heads, Size per, Size cols, Size width, Size value_width,
                                 Size q_row, Size q_head, Size k_row, Size k_head, Size v_row, Size v_head, float scale,
                                 float softcap, Size window, int kind, int threads) {
    Step step{order, starts, counts, lengths, prompt_lengths, tables, prompt_tables, tiles, blocks, prompt_blocks};
#define DECODE(N)                                                                                                   \
    decode_tiles<N>((const T*)q, (const T*)k, (const T*)v, (T*)keys, (T*)values, sinks, (T*)out, step, heads,   \
                        per, cols, width, value_width, q_row, q_head, k_row, k_head, v_row, v_head, scale, softcap, \
                        window, threads)
    KIND(kind, T, if (width == 64) DECODE(64 / W); else if (width == 128) DECODE(128 / W); else DECODE(0))
}

// ---- attention of a pack: spans of tokens, each of which sees what is before it in its span, and other spans as a whole

struct Spans {
    const Size *starts, *ends, *first, *prefix_starts, *prefix_ends;  // prefixes of span i: from first[i] to first[i + 1]
    Size count;
};

// What queries and keys are when they meet: numbers, or pairs of bfloat16, of which a row has `depth`
template <class T> using Element = std::conditional_t<PAIRS && sizeof(T) == 2, uint32_t, float>;
static inline V vector(const float* p) { return load(p); }
static inline void add_products(V& sum, float a, V b) { sum += a * b; }
#if defined(__AVX512BF16__)
static inline U vector(const uint32_t* p) {
    U v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void add_products(V& sum, uint32_t a, U b) {
    sum = (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#endif
// scores [Q][step] = scale · q [Q, depth] · kt [depth][tokens], of C vectors of keys
template <int Q, int C, class E>
static inline void score_tile(const E* q, Size depth, const E* kt, Size tokens, float scale, float* scores, Size step) {
    V acc[Q][C] = {};
    for (Size d = 0; d < depth; d++)
        for (int c = 0; c < C; c++) {
            auto v = vector(kt + d * tokens + c * W);
            HOLD(v);
            for (int r = 0; r < Q; r++) add_products(acc[r][c], q[r * depth + d], v);
        }
    for (int r = 0; r < Q; r++)
        for (int c = 0; c < C; c++) store(scores + r * step + c * W, acc[r][c] * scale);
}
template <int C, class E>
static inline void score_columns(const E* q, Size m, Size depth, const E* kt, Size tokens, float scale, float* scores,
                                 Size step) {
    constexpr int Q = W == 16 ? 8 : 4;
    Size i = 0;
    for (; i + Q <= m; i += Q) score_tile<Q, C>(q + i * depth, depth, kt, tokens, scale, scores + i * step, step);
    for (; i + 2 <= m; i += 2) score_tile<2, C>(q + i * depth, depth, kt, tokens, scale, scores + i * step, step);
    for (; i < m; i++) score_tile<1, C>(q + i * depth, depth, kt, tokens, scale, scores + i * step, step);
}
// scores [m][step] = scale · q [m, depth] · kt [depth][tokens], of `count` keys from kt on and up to a vector more
template <class E>
static void transposed_scores(const E* q, Size m, Size depth, const E* kt, Size tokens, Size count, float scale,
                              float* scores, Size step) {
    Size j = 0;
    for (; j + W < count; j += 2 * W) score_columns<2>(q, m, depth, kt + j, tokens, scale, scores + j, step);
    if (j < count) score_columns<1>(q, m, depth, kt + j, tokens, scale, scores + j, step);
}

struct Heads {  // of queries, keys and values: steps of heads and tokens
    Size tokens, per, width, q_head, q_token, k_head, k_token, v_head, v_token;
    float scale;
};
constexpr Size PACK_QUERIES = 32;

// The rows of one key head: float copies of keys and values, and what every block of queries does with them
template <class T> struct PackHead {
    using E = Element<T>;
    using Elements = std::vector<E, OnLines<E>>;
    const Heads& size;
    const Spans& spans;
    Size head, padded, depth, queries = 0, step = 0, visible = 0, first = 0, rows = 0;
    Floats keys, values, scores;
    Elements keys_t, values_t, query_elements;
    std::vector<std::pair<Size, Size>> ranges;

    PackHead(const Heads& size, const Spans& spans, Size head, const T* k, const T* v, bool backward)
        : size(size), spans(spans), head(head), padded(size.tokens + 2 * W),
          depth(std::is_same_v<E, float> ? size.width : (size.width + 1) / 2) {
        copy(k + head * size.k_head, size.k_token, backward ? &keys : nullptr, &keys_t);
        copy(v + head * size.v_head, size.v_token, &values, backward ? &values_t : nullptr);
        query_elements.resize((PACK_QUERIES + size.per) * depth);
    }
    Floats room() const { return Floats((PACK_QUERIES + size.per) * size.width); }
    void copy(const T* from, Size token_step, Floats* rows, Elements* turned) {
        if (rows) rows->resize(size.tokens * size.width);
        if (turned) turned->assign(depth * padded, 0);
        Elements row(depth);
        for (Size t = 0; t < size.tokens; t++) {
            if (rows) copy_row(from + t * token_step, rows->data() + t * size.width);
            if (!turned) continue;
            copy_row(from + t * token_step, row.data());
            for (Size d = 0; d < depth; d++) (*turned)[d * padded + t] = row[d];
        }
    }
    void copy_row(const T* from, float* to) {
        each(size.width, [&](Size d, int n) { store(to + d, load(from + d, n), n); });
    }
    void copy_row(const T* from, uint32_t* to) {
        to[depth - 1] = 0;
        memcpy(to, from, size.width * sizeof(T));
    }
    // rows of queries, [tokens, heads, width] or by steps, as numbers or elements [queries, width or depth]
    template <class X> void gather(const T* from, Size head_step, Size token_step, X* to) {
        for (Size i = 0; i < queries; i++)
            copy_row(from + (head * size.per + i % size.per) * head_step + (first + i / size.per) * token_step,
                     to + i * (std::is_same_v<X, E> ? depth : size.width));
    }
    // f() of each block of queries, whose keys are `ranges`; `seen(i)`: how many of them query i sees
    template <class F> void blocks(F f) {
        Size at_once = std::max<Size>(1, PACK_QUERIES / size.per);
        for (Size s = 0; s < spans.count; s++)
            for (first = spans.starts[s]; first < spans.ends[s]; first += at_once) {
                rows = std::min(at_once, spans.ends[s] - first);
                queries = rows * size.per;
                ranges.clear();
                Size keys_seen = first - spans.starts[s];
                for (Size p = spans.first[s]; p < spans.first[s + 1]; p++) {
                    ranges.push_back({spans.prefix_starts[p], spans.prefix_ends[p]});
                    keys_seen += spans.prefix_ends[p] - spans.prefix_starts[p];
                }
                ranges.push_back({spans.starts[s], first + rows});
                visible = keys_seen;
                step = keys_seen + rows + 2 * W;
                f();
            }
    }
    Size seen(Size i) const { return visible + i / size.per + 1; }
    void dots(const T* from, Size head_step, Size token_step, const Elements& turned, float scale, Floats& to) {
        if (Size(to.size()) < queries * step + 2 * W) to.resize(queries * step + 2 * W);
        gather(from, head_step, token_step, query_elements.data());
        Size at = 0;
        for (auto [from, end] : ranges) {
            transposed_scores(query_elements.data(), queries, depth, turned.data() + from, padded, end - from, scale,
                              to.data() + at, step);
            at += end - from;
        }
    }
    // out [queries, width] += weights · rows of the keys
    void sums(const Floats& weights, const Floats& of, float* out) {
        Size at = 0;
        for (auto [from, end] : ranges) {
            product(weights.data() + at, step, 1, queries, of.data() + from * size.width, end - from, size.width, out);
            at += end - from;
        }
    }
    // rows of the keys += weightsᵀ · x [queries, width]
    void spread(const Floats& weights, const float* x, Floats& to) {
        Size at = 0;
        for (auto [from, end] : ranges) {
            product(weights.data() + at, 1, step, end - from, x, queries, size.width, to.data() + from * size.width);
            at += end - from;
        }
    }
};

template <class T>
static void pack_forward(const T* q, const T* k, const T* v, T* out, float* lse, const Heads& size, const Spans& spans,
                         Size kv_heads, int threads) {
    DYNAMIC
    for (Size head = 0; head < kv_heads; head++) {
        PackHead<T> h(size, spans, head, k, v, false);
        Floats sums = h.room(), totals(PACK_QUERIES + size.per);
        Size heads = kv_heads * size.per, width = size.width;
        h.blocks([&] {
            h.dots(q, size.q_head, size.q_token, h.keys_t, size.scale, h.scores);
            std::fill(sums.begin(), sums.end(), 0.f);
            for (Size i = 0; i < h.queries; i++) {
                float* s = h.scores.data() + i * h.step;
                Size seen = h.seen(i);
                V peak = all(-INFINITY), total{};
                each(seen, [&](Size d, int n) { peak = most(filled(load(s + d, n), n, -INFINITY), peak); });
                float top = largest(peak);
                each(seen, [&](Size d, int n) {
                    V e = exponential(load(s + d, n) - top);
                    store(s + d, e, n);
                    total += filled(e, n, 0.f);
                });
                totals[i] = sum(total);
                std::fill(s + seen, s + h.visible + h.rows, 0.f);
                lse[(head * size.per + i % size.per) * size.tokens + h.first + i / size.per] = top + std::log(totals[i]);
            }
            h.sums(h.scores, h.values, sums.data());
            for (Size i = 0; i < h.queries; i++) {
                T* to = out + ((h.first + i / size.per) * heads + head * size.per + i % size.per) * width;
                float factor = 1.f / totals[i];
                each(width, [&](Size d, int n) { store(to + d, load(sums.data() + i * width + d, n) * factor, n); });
            }
        });
    }
}

template <class T>
static void pack_gradients(const T* grad, const T* q, const T* k, const T* v, const T* out, const float* lse, T* dq, T* dk,
                           T* dv, const Heads& size, const Spans& spans, Size kv_heads, int threads) {
    DYNAMIC
    for (Size head = 0; head < kv_heads; head++) {
        PackHead<T> h(size, spans, head, k, v, true);
        Size heads = kv_heads * size.per, width = size.width;
        Floats keys(size.tokens * width), values(size.tokens * width), d_scores;
        Floats query_numbers = h.room(), d_out = h.room(), wide = h.room(), sums = h.room();
        h.blocks([&] {
            h.gather(q, size.q_head, size.q_token, query_numbers.data());
            h.gather(grad, width, heads * width, d_out.data());
            h.gather(out, width, heads * width, wide.data());
            h.dots(q, size.q_head, size.q_token, h.keys_t, size.scale, h.scores);
            h.dots(grad, width, heads * width, h.values_t, 1.f, d_scores);
            std::fill(sums.begin(), sums.end(), 0.f);
            for (Size i = 0; i < h.queries; i++) {
                V along{};
                each(width, [&](Size d, int n) {
                    along += load(d_out.data() + i * width + d, n) * load(wide.data() + i * width + d, n);
                });
                float mean = sum(along);
                float normaliser = lse[(head * size.per + i % size.per) * size.tokens + h.first + i / size.per];
                float *s = h.scores.data() + i * h.step, *g = d_scores.data() + i * h.step;
                Size seen = h.seen(i);
                each(seen, [&](Size d, int n) {
                    V p = exponential(load(s + d, n) - normaliser);
                    store(s + d, p, n);
                    store(g + d, p * (load(g + d, n) - mean), n);
                });
                std::fill(s + seen, s + h.visible + h.rows, 0.f);
                std::fill(g + seen, g + h.visible + h.rows, 0.f);
            }
            h.sums(d_scores, h.keys, sums.data());
            h.spread(h.scores, d_out.data(), values);
            h.spread(d_scores, query_numbers.data(), keys);
            for (Size i = 0; i < h.queries; i++) {
                T* to = dq + ((h.first + i / size.per) * heads + head * size.per + i % size.per) * width;
                each(width, [&](Size d, int n) { store(to + d, load(sums.data() + i * width + d, n) * size.scale, n); });
            }
        });
        for (Size t = 0; t < size.tokens; t++)
            each(width, [&](Size d, int n) {
                store(dk + (t * kv_heads + head) * width + d, load(keys.data() + t * width + d, n) * size.scale, n);
                store(dv + (t * kv_heads + head) * width + d, load(values.data() + t * width + d, n), n);
            });
    }
}
#define PACK                                                                                                       \
    Heads size{tokens, per, width, q_head, q_token, k_head, k_token, v_head, v_token, scale};                      \
    Spans spans{starts, ends, first, prefix_starts, prefix_ends, count};
extern "C" void pack_attention(const void* q, const void* k, const void* v, void* out, float* lse, const Size* starts,
                               const Size* ends, const Size* first, const Size* prefix_starts, const Size* prefix_ends,
                               Size count, Size kv_heads, Size tokens, Size per, Size width, Size q_head, Size q_token,
                               Size k_head, Size k_token, Size v_head, Size v_token, float scale, int kind, int threads) {
    PACK
    KIND(kind, T, pack_forward((const T*)q, (const T*)k, (const T*)v, (T*)out, lse, size, spans, kv_heads, threads))
}
extern "C" void pack_attention_backward(const void* grad, const void* q, const void* k, const void* v, const void* out,
                                        const float* lse, void* dq, void* dk, void* dv, const Size* starts,
                                        const Size* ends, const Size* first, const Size* prefix_starts,
                                        const Size* prefix_ends, Size count, Size kv_heads, Size tokens, Size per,
                                        Size width, Size q_head, Size q_token, Size k_head, Size k_token, Size v_head,
                                        Size v_token, float scale, int kind, int threads) {
    PACK
    KIND(kind, T, pack_gradients((const T*)grad, (const T*)q, (const T*)k, (const T*)v, (const T*)out, lse, (T*)dq,
                                 (T*)dk, (T*)dv, size, spans, kv_heads, threads))
}

// ---- products with packed weights: panels [columns / W][depth][W] of elements, numbers or pairs of bfloat16

extern "C" int vector_width() { return W; }
extern "C" int multiplies_pairs() { return PAIRS; }
extern "C" void pack_weight(const uint32_t* weight, uint32_t* packed, Size columns, Size depth, int threads) {
    PARALLEL(columns * depth)
    for (Size c = 0; c < columns; c += W)
        for (Size i = 0; i < W; i++)
            for (Size d = 0; d < depth; d++) packed[c * depth + d * W + i] = weight[(c + i) * depth + d];
}

// out [R][step] = x [depth][R] · C panels + bias: each number by one chain of sums from the first element to the last
template <int R, int C, class E, class T>
static inline void product_tile(const E* x, const E* panels, Size depth, const T* bias, T* out, Size step) {
    constexpr Size AHEAD = 32 * W;  // the processor alone fetches too late what no cache holds
    V acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = bias ? load(bias + c * W) : V{};
    for (Size d = 0; d < depth; d++) {
        decltype(vector(panels)) weights[C];
        for (int c = 0; c < C; c++) {
            weights[c] = vector(panels + (c * depth + d) * W);
            HOLD(weights[c]);
            __builtin_prefetch(panels + (c * depth + d) * W + AHEAD);
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) add_products(acc[r][c], x[d * R + r], weights[c]);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * step + c * W, acc[r][c]);
}
template <int R, int C, class E, class T>
static inline void product_rows(Size rows, const E* x, const E* panels, Size depth, const T* bias, T* out, Size step) {
    if constexpr (R > 0) {
        if (rows == R)
            product_tile<R, C>(x, panels, depth, bias, out, step);
        else
            product_rows<R - 1, C>(rows, x, panels, depth, bias, out, step);
    }
}
// rows of x, at most W, side by side: turned [depth][rows], after which W - 1 numbers are written
template <class E> static void turn(const E* x, Size rows, Size depth, E* turned) {
    static_assert(sizeof(E) == sizeof(float));
    Size d = 0;
    for (; d + W <= depth; d += W) {
        V v[W] = {};
        for (Size i = 0; i < rows; i++) memcpy(&v[i], x + i * depth + d, sizeof(V));
        transpose(v);
        for (Size i = 0; i < W; i++) memcpy(turned + (d + i) * rows, &v[i], sizeof(V));
    }
    for (; d < depth; d++)
        for (Size i = 0; i < rows; i++) turned[d * rows + i] = x[i * depth + d];
}
template <class T>
static void packed_products(const T* x, const Element<T>* packed, const T* bias, T* out, Size rows, Size depth,
                            Size columns, int threads) {
    using E = Element<T>;
    // as many rows at once as registers have room for their sums: of one panel, or of two where that reads fewer numbers
    constexpr int FEW = W == 16 ? 16 : 12, MOST = W == 16 ? 14 : 6;
    Size blocks = rows <= FEW ? 1 : (rows + MOST - 1) / MOST, step = rows <= FEW ? W : 2 * W;
    auto start = [&](Size block) { return rows * block / blocks; };
    static thread_local std::vector<E, OnLines<E>> room;
    if (Size(room.size()) < rows * depth + W) room.resize(rows * depth + W);
    E* turned = room.data();
    for (Size b = 0; b < blocks; b++)
        turn((const E*)x + start(b) * depth, start(b + 1) - start(b), depth, turned + start(b) * depth);
    PRAGMA(omp parallel for num_threads(threads) if (threads > 1))
    for (Size c = 0; c < columns; c += step)
        for (Size b = 0; b < blocks; b++) {
            auto one = rows <= FEW ? product_rows<FEW, 1, E, T> : product_rows<MOST, 1, E, T>;
            auto product = step > W && c + W < columns ? product_rows<MOST, 2, E, T> : one;
            Size first = start(b);
            product(start(b + 1) - first, turned + first * depth, packed + c * depth, depth, bias ? bias + c : nullptr,
                    out + first * columns + c, columns);
        }
}
extern "C" void packed_product(const void* x, const void* packed, const void* bias, void* out, Size rows, Size depth,
                               Size columns, int kind, int threads) {
    KIND(kind, T, packed_products((const T*)x, (const Element<T>*)packed, (const T*)bias, (T*)out, rows, depth, columns,
                                  threads))
}
