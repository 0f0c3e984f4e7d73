/* Operations of a transformer on the CPU that are not matrix products: activations, norms, losses and attention.
 *
 * Each function reads its inputs once and writes its outputs once. A run compiles this file for its own processor.
 *
 * Results do not depend on the width of the processor's vector registers: every sum has sixteen lanes, and adds in
 * one order with fused multiply-adds. A vector of this file is as wide as a register, because compilers keep the
 * parts of wider vectors in memory.
 *
 * Arguments named `size` are the bytes of an element: 4 for fp32, 2 for bf16. */

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <math.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { LANES = 16, ROWS = 64, PANEL = 32, BLOCK = 1024, GROUP = 4, NARROW = 512 };

#if defined __AVX512F__
enum { WIDTH = 16 };
#elif defined __AVX__
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
enum { PARTS = LANES / WIDTH };

typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

/* Partial sums of sixteen lanes, which `total` adds. */
typedef struct { Floats part[PARTS]; } Sum;

#define INLINE static inline __attribute__((always_inline))

INLINE Floats all(float x) { return x - (Floats){0}; }

INLINE Floats chosen(Ints mask, Floats yes, Floats no) {
    return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no));
}

/* Return 16-bit numbers as 32-bit ones, by one instruction. GCC 12 needs five for `__builtin_convertvector`. */
INLINE Words widened(Halves x) {
#if defined __AVX512F__
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined __AVX2__
    return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}

/* Return the lower halves of 32-bit numbers. */
INLINE Halves narrowed(Words x) {
#if defined __AVX512F__
    return (Halves)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return __builtin_convertvector(x, Halves);
#endif
}

/* Load one vector of elements of `size` bytes as fp32. */
INLINE Floats load(const char *at, int size) {
    if (size == 4) return *(const Floats *)at;
    return (Floats)(widened(*(const Halves *)at) << 16);
}

/* Round to bf16, to nearest even. The instruction for this makes subnormal numbers 0. */
INLINE Halves rounded(Floats x) {
#ifdef __AVX512BF16__
    const int subnormal = 0x20;
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)x, subnormal), 1))
        return (Halves)_mm512_cvtneps_pbh((__m512)x);
#endif
    Words bits = (Words)x, even = bits + 0x7fff + ((bits >> 16) & 1);
    Ints nan = x != x;
    return narrowed((((Words)nan & (bits | 0x400000)) | (~(Words)nan & even)) >> 16);
}

INLINE void store(char *at, int size, Floats x) {
    if (size == 4) *(Floats *)at = x;
    else *(Halves *)at = rounded(x);
}

INLINE Floats load_some(const char *at, int size, int count) {
    char some[4 * WIDTH] = {0};
    memcpy(some, at, (size_t)count * size);
    return load(some, size);
}

INLINE void store_some(char *at, int size, int count, Floats x) {
    char some[4 * WIDTH];
    store(some, size, x);
    memcpy(at, some, (size_t)count * size);
}

/* Return x with all lanes after the first `count` replaced by `otherwise`. */
INLINE Floats first(int count, Floats x, float otherwise) {
    Ints lanes;
    for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] = lane;
    return chosen(lanes < count, x, all(otherwise));
}

INLINE float total(Sum x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += x.part[lane / WIDTH][lane % WIDTH];
    return sum;
}

/* Return how many lanes of the vector that starts at element i are among `count` elements. */
INLINE int within(size_t count, size_t i) {
    return count <= i ? 0 : count - i < WIDTH ? (int)(count - i) : WIDTH;
}

INLINE Floats load_within(const char *at, int size, int some) {
    return some == WIDTH ? load(at, size) : load_some(at, size, some);
}

INLINE void store_within(char *at, int size, int some, Floats x) {
    if (some == WIDTH) store(at, size, x);
    else store_some(at, size, some, x);
}

/* Split x between -126 and 128 into its nearest integer, which is returned times 2^23, and the rest f. */
INLINE Ints split(Floats *x) {
    const Floats whole = (*x + 12582912.0f) - 12582912.0f;
    *x -= whole;
    return __builtin_convertvector(whole, Ints) << 23;
}

/* Return x raised to `least` and lowered to `most`. */
INLINE Floats clamped(Floats x, float least, float most) {
    x = chosen(x < least, all(least), x);
    return chosen(x > most, all(most), x);
}

/* Return (2^f - 1) / f for f between -1/2 and 1/2. */
INLINE Floats power_slope(Floats f) {
    Floats p = all(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    return p * f + 6.931472028550421e-1f;
}

/* Return 2^x with a relative error of 2e-7. x is raised to -126 at least; the result is infinite from x = 128. */
INLINE Floats power_of_2(Floats x) {
    x = clamped(x, -126.0f, 128.0f);
    const Ints exponent = split(&x);
    return (Floats)((Ints)(power_slope(x) * x + 1.0f) + exponent);
}

/* Return e^x with a relative error of 2e-7; 0 for x below -87.3. */
INLINE Floats exponential(Floats x) {
    x *= 1.4426950408889634f;
    return chosen(x < -126.0f, all(0), power_of_2(x));
}

INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + power_of_2(x * -1.4426950408889634f)); }

/* Return gelu(x) / x = sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3): the tanh approximation of GELU. */
INLINE Floats gelu_gate(Floats x) {
    return sigmoid(x * (1.5957691216057308f + 0.07135481627159519f * x * x));
}

/* Run the code for each vector of `count` elements. It sees the index `i` of the first element, and `some`, the
 * number of elements. */
#define ELEMENTS(count, ...)                                                                     \
    {                                                                                            \
        size_t i = 0;                                                                            \
        for (; i + WIDTH <= (count); i += WIDTH) { const int some = WIDTH; __VA_ARGS__ }         \
        if (i < (count)) { const int some = within(count, i); __VA_ARGS__ }                      \
    }

/* Like ELEMENTS. The code also sees `part`, the vector of a Sum to which these elements are added. */
#define SUMMED(count, ...)                                                                       \
    {                                                                                            \
        size_t start = 0;                                                                        \
        for (; start + LANES <= (count); start += LANES)                                         \
            for (int part = 0; part < PARTS; ++part) {                                           \
                const int some = WIDTH;                                                          \
                const size_t i = start + part * WIDTH;                                           \
                __VA_ARGS__                                                                      \
            }                                                                                    \
        for (int part = 0; start < (count) && part < PARTS; ++part) {                            \
            const size_t i = start + part * WIDTH;                                               \
            const int some = within(count, i);                                                   \
            __VA_ARGS__                                                                          \
        }                                                                                        \
    }

INLINE void gelu_of(const char *x, char *y, size_t count, int size) {
    ELEMENTS(count, {
        const Floats a = load_within(x + i * size, size, some);
        store_within(y + i * size, size, some, a * gelu_gate(a));
    })
}

INLINE Floats gelu_slope(Floats a) {
    Floats s = gelu_gate(a);
    return s + a * s * (1.0f - s) * (1.5957691216057308f + 0.21406444881478557f * a * a);
}

INLINE void gelu_gradient_of(const char *dy, const char *x, char *dx, size_t count, int size) {
    ELEMENTS(count, {
        const Floats a = load_within(x + i * size, size, some), d = load_within(dy + i * size, size, some);
        store_within(dx + i * size, size, some, d * gelu_slope(a));
    })
}

/* Load one vector of factors of normalized features: the weights, plus one if `offset` is not 0. */
INLINE Floats factors(const char *weight, int offset, int size, int some) {
    Floats w = load_within(weight, size, some);
    if (offset) w += 1.0f;
    return w;
}

/* Run the code for all rows of a token. It sees `count`, the number of rows that it computes: GROUP or 1. Groups of
 * narrow bf16 rows take two thirds of the time, since each weight is converted once for all of them. */
#define ROW_GROUPS(rows, width, size, ...)                                                       \
    {                                                                                            \
        size_t left = (rows);                                                                    \
        const int grouped = (size) == 2 && (width) <= NARROW;                                    \
        for (; grouped && left >= GROUP; left -= GROUP) { const int count = GROUP; __VA_ARGS__ } \
        for (; left; --left) { const int count = 1; __VA_ARGS__ }                                \
    }

/* Load memory into the cache early. Processors do not do so for heads, whose tokens are far apart. */
INLINE void prefetch(const char *at, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
}

INLINE void rms_norm_rows(const char *x, const char *weight, char *y, float *inverse, size_t width, float epsilon,
                          int offset, int size, const int count) {
    const size_t bytes = width * size;
    Sum sum[GROUP] = {0};
    SUMMED(width, {
        for (int row = 0; row < count; ++row) {
            const Floats a = load_within(x + row * bytes + i * size, size, some);
            sum[row].part[part] += a * a;
        }
    })
    for (int row = 0; row < count; ++row) inverse[row] = 1 / sqrtf(total(sum[row]) / width + epsilon);
    ELEMENTS(width, {
        const Floats w = factors(weight + i * size, offset, size, some);
        for (int row = 0; row < count; ++row) {
            const Floats a = load_within(x + row * bytes + i * size, size, some);
            store_within(y + row * bytes + i * size, size, some, a * inverse[row] * w);
        }
    })
}

/* RMSNorm: y = x * inverse * (weight + offset) for x and y [tokens, rows, width], such as those of each head, where
 * `inverse` [tokens, rows] is 1 / sqrt(mean(x^2) + epsilon). Tokens of x are `stride` elements apart. `offset` is 0 or
 * 1. */
INLINE void rms_norm_of(const char *from, size_t stride, const char *weight, char *y, float *inverse,
                        size_t tokens, size_t rows, size_t width, float epsilon, int offset, int size) {
    for (size_t token = 0; token < tokens; ++token, from += stride * size) {
        const char *x = from;
        prefetch(from + stride * size, token + 1 < tokens ? rows * width * size : 0);
        ROW_GROUPS(rows, width, size, {
            rms_norm_rows(x, weight, y, inverse, width, epsilon, offset, size, count);
            inverse += count, x += count * width * size, y += count * width * size;
        })
    }
}

INLINE void rms_norm_gradient_rows(const char *dy, const char *x, const char *weight, const float *inverse, char *dx,
                                   float *dweight, size_t width, int offset, int size, const int count) {
    const size_t bytes = width * size;
    Sum sum[GROUP] = {0};
    SUMMED(width, {
        const Floats w = factors(weight + i * size, offset, size, some);
        char *to = (char *)(dweight + i);
        Floats gradient = load_within(to, 4, some);
        for (int row = 0; row < count; ++row) {
            const Floats a = load_within(x + row * bytes + i * size, size, some);
            const Floats d = load_within(dy + row * bytes + i * size, size, some);
            sum[row].part[part] += a * d * w;
            gradient += a * inverse[row] * d;
        }
        store_within(to, 4, some, gradient);
    })
    float mean[GROUP];
    for (int row = 0; row < count; ++row) mean[row] = total(sum[row]) * inverse[row] * inverse[row] / width;
    ELEMENTS(width, {
        const Floats w = factors(weight + i * size, offset, size, some);
        for (int row = 0; row < count; ++row) {
            const Floats a = load_within(x + row * bytes + i * size, size, some);
            const Floats d = load_within(dy + row * bytes + i * size, size, some);
            store_within(dx + row * bytes + i * size, size, some, inverse[row] * (d * w - a * mean[row]));
        }
    })
}

/* Gradients of RMSNorm. `dx` is overwritten; the gradient of the weight is added to `dweight` [width], fp32. */
INLINE void rms_norm_gradient_of(const char *dy, const char *from, size_t stride, const char *weight,
                                 const float *inverse, char *dx, float *dweight, size_t tokens, size_t rows,
                                 size_t width, int offset, int size) {
    for (size_t token = 0; token < tokens; ++token, from += stride * size) {
        const char *x = from;
        const size_t bytes_ahead = token + 1 < tokens ? rows * width * size : 0;
        prefetch(from + stride * size, bytes_ahead);
        prefetch(dy + bytes_ahead, bytes_ahead);
        ROW_GROUPS(rows, width, size, {
            const size_t bytes = count * width * size;
            rms_norm_gradient_rows(dy, x, weight, inverse, dx, dweight, width, offset, size, count);
            inverse += count, x += bytes, dy += bytes, dx += bytes;
        })
    }
}

/* LayerNorm: y = (x - mean) * inverse * weight + bias for x [rows, width], where `inverse` [rows] is
 * 1 / sqrt(variance + epsilon). */
INLINE void layer_norm_of(const char *x, const char *weight, const char *bias, char *y, float *mean, float *inverse,
                          size_t rows, size_t width, float epsilon, int size) {
    for (size_t row = 0; row < rows; ++row, x += width * size, y += width * size) {
        Sum sum = {0}, rest = {0}, squares = {0};
        SUMMED(width, { sum.part[part] += load_within(x + i * size, size, some); })
        /* First the rounded mean, then its error, so that the deviations of a constant row are exactly 0. */
        const float about = total(sum) / width;
        SUMMED(width, {
            const Floats a = load_within(x + i * size, size, some) - about;
            const Floats b = some == WIDTH ? a : first(some, a, 0);
            rest.part[part] += b;
            squares.part[part] += b * b;
        })
        const float left = total(rest) / width, middle = mean[row] = about + left;
        const float variance = total(squares) / width - left * left;
        /* If the squares of a row overflow fp32, the result is NaN. */
        const float root = inverse[row] = isfinite(variance) ? 1 / sqrtf(fmaxf(variance, 0) + epsilon) : NAN;
        ELEMENTS(width, {
            const Floats a = load_within(x + i * size, size, some), w = load_within(weight + i * size, size, some);
            const Floats b = load_within(bias + i * size, size, some);
            store_within(y + i * size, size, some, (a - middle) * root * w + b);
        })
    }
}

/* Gradients of LayerNorm. `dx` is overwritten; those of weight and bias are added to `dweight` and `dbias`
 * [width], fp32. */
INLINE void layer_norm_gradient_of(const char *dy, const char *x, const char *weight, const float *mean,
                                   const float *inverse, char *dx, float *dweight, float *dbias, size_t rows,
                                   size_t width, int size) {
    for (size_t row = 0; row < rows; ++row, dy += width * size, x += width * size, dx += width * size) {
        const float root = inverse[row], middle = mean[row];
        Sum sum = {0}, along = {0};
        SUMMED(width, {
            const Floats a = load_within(x + i * size, size, some), d = load_within(dy + i * size, size, some);
            const Floats w = load_within(weight + i * size, size, some);
            const Floats normal = (a - middle) * root, add = normal * d;
            sum.part[part] += d * w;
            along.part[part] += add * w;
            char *to = (char *)(dweight + i), *beside = (char *)(dbias + i);
            store_within(to, 4, some, load_within(to, 4, some) + add);
            store_within(beside, 4, some, load_within(beside, 4, some) + d);
        })
        const float part = total(sum) / width, slope = total(along) / width;
        ELEMENTS(width, {
            const Floats a = load_within(x + i * size, size, some), d = load_within(dy + i * size, size, some);
            const Floats w = load_within(weight + i * size, size, some);
            store_within(dx + i * size, size, some, root * (d * w - part - (a - middle) * root * slope));
        })
    }
}

/* SwiGLU: y = silu(gate) * up. A row of x [rows, 2 width] holds gate, then up. */
INLINE void gated_of(const char *x, char *y, size_t rows, size_t width, int size) {
    for (size_t row = 0; row < rows; ++row, x += 2 * width * size, y += width * size) {
        const char *up = x + width * size;
        ELEMENTS(width, {
            const Floats g = load_within(x + i * size, size, some);
            store_within(y + i * size, size, some, g * sigmoid(g) * load_within(up + i * size, size, some));
        })
    }
}

INLINE void gated_gradient_of(const char *dy, const char *x, char *dx, size_t rows, size_t width, int size) {
    for (size_t row = 0; row < rows; ++row, x += 2 * width * size, dx += 2 * width * size, dy += width * size) {
        const char *up = x + width * size;
        char *dup = dx + width * size;
        ELEMENTS(width, {
            const Floats g = load_within(x + i * size, size, some), u = load_within(up + i * size, size, some);
            const Floats d = load_within(dy + i * size, size, some);
            const Floats s = sigmoid(g), dg = d * u * s * (1.0f + g * (1.0f - s)), du = d * g * s;
            store_within(dx + i * size, size, some, dg);
            store_within(dup + i * size, size, some, du);
        })
    }
}

/* GeGLU: y = gelu(gate) * up, with the tanh approximation of GELU. Rows of x are as in `gated_of`. */
INLINE void geglu_of(const char *x, char *y, size_t rows, size_t width, int size) {
    for (size_t row = 0; row < rows; ++row, x += 2 * width * size, y += width * size) {
        const char *up = x + width * size;
        ELEMENTS(width, {
            const Floats g = load_within(x + i * size, size, some);
            store_within(y + i * size, size, some, g * gelu_gate(g) * load_within(up + i * size, size, some));
        })
    }
}

INLINE void geglu_gradient_of(const char *dy, const char *x, char *dx, size_t rows, size_t width, int size) {
    for (size_t row = 0; row < rows; ++row, x += 2 * width * size, dx += 2 * width * size, dy += width * size) {
        const char *up = x + width * size;
        char *dup = dx + width * size;
        ELEMENTS(width, {
            const Floats g = load_within(x + i * size, size, some), u = load_within(up + i * size, size, some);
            const Floats d = load_within(dy + i * size, size, some);
            const Floats dg = d * u * gelu_slope(g), du = d * g * gelu_gate(g);
            store_within(dx + i * size, size, some, dg);
            store_within(dup + i * size, size, some, du);
        })
    }
}

/* Softmax statistics of the logits factor * x, with x [rows, columns] in rows of `width` elements.
 *
 * For each row: `extreme`, the largest sign(factor) * x, at least -FLT_MAX; `sum`, the sum of
 * exp(logit - largest logit); `at_column`, the logit of `column`, or -infinity if that is negative. A row is read in
 * blocks, each one once from memory. */
INLINE void softmax_statistics_of(const char *x, const int64_t *column, float *extreme, float *sum, float *at_column,
                                  size_t rows, size_t columns, size_t width, float factor, int size) {
    const float sign = copysignf(1, factor), scale = fabsf(factor);
    for (size_t row = 0; row < rows; ++row, x += width * size) {
        float largest = -FLT_MAX, whole = 0;
        for (size_t start = 0; start < columns; start += BLOCK) {
            const char *at = x + start * size;
            const size_t count = columns - start < BLOCK ? columns - start : BLOCK;
            Floats most = all(largest);
            Sum sums = {0};
            ELEMENTS(count, {
                const Floats b = load_within(at + i * size, size, some) * sign;
                const Floats a = some == WIDTH ? b : first(some, b, -FLT_MAX);
                most = chosen(a > most, a, most);
            })
            const float before = largest;
            for (int lane = 0; lane < WIDTH; ++lane) largest = most[lane] > largest ? most[lane] : largest;
            SUMMED(count, {
                const Floats a = exponential((load_within(at + i * size, size, some) * sign - largest) * scale);
                sums.part[part] += some == WIDTH ? a : first(some, a, 0);
            })
            whole = whole * exponential(all((before - largest) * scale))[0] + total(sums);
        }
        extreme[row] = largest;
        sum[row] = whole;
        at_column[row] = column[row] < 0 ? -INFINITY : (load_some(x + column[row] * size, size, 1) * factor)[0];
    }
}

/* Overwrite x with its gradient: factor * (weight * exp(logit - largest logit) - column_weight, the latter only at
 * `column`). `weight` and `column_weight` are [rows]. The padding of each row becomes 0. */
INLINE void softmax_gradient_of(char *x, const int64_t *column, const float *extreme, const float *weight,
                                  const float *column_weight, size_t rows, size_t columns, size_t width, float factor,
                                  int size) {
    const float sign = copysignf(1, factor), scale = fabsf(factor);
    for (size_t row = 0; row < rows; ++row, x += width * size) {
        const float largest = extreme[row], times = weight[row] * factor;
        char *at = column[row] < 0 ? 0 : x + column[row] * size;
        Floats there = all(0);
        if (at) {
            const Floats a = (load_some(at, size, 1) * sign - largest) * scale;
            there = exponential(a) * times - column_weight[row] * factor;
        }
        ELEMENTS(columns, {
            const Floats a = (load_within(x + i * size, size, some) * sign - largest) * scale;
            store_within(x + i * size, size, some, exponential(a) * times);
        })
        memset(x + columns * size, 0, (width - columns) * size);
        if (at) store_some(at, size, 1, there);
    }
}

#define BY_SIZE(size, call_4, call_2) if ((size) == 4) { call_4; } else { call_2; }

void gelu(const char *x, char *y, size_t rows, size_t width, int size) {
    BY_SIZE(size, gelu_of(x, y, rows * width, 4), gelu_of(x, y, rows * width, 2))
}

void gelu_gradient(const char *dy, const char *x, char *dx, size_t rows, size_t width, int size) {
    BY_SIZE(size, gelu_gradient_of(dy, x, dx, rows * width, 4), gelu_gradient_of(dy, x, dx, rows * width, 2))
}

void gated(const char *x, char *y, size_t rows, size_t width, int size) {
    BY_SIZE(size, gated_of(x, y, rows, width, 4), gated_of(x, y, rows, width, 2))
}

void gated_gradient(const char *dy, const char *x, char *dx, size_t rows, size_t width, int size) {
    BY_SIZE(size, gated_gradient_of(dy, x, dx, rows, width, 4), gated_gradient_of(dy, x, dx, rows, width, 2))
}

void geglu(const char *x, char *y, size_t rows, size_t width, int size) {
    BY_SIZE(size, geglu_of(x, y, rows, width, 4), geglu_of(x, y, rows, width, 2))
}

void geglu_gradient(const char *dy, const char *x, char *dx, size_t rows, size_t width, int size) {
    BY_SIZE(size, geglu_gradient_of(dy, x, dx, rows, width, 4), geglu_gradient_of(dy, x, dx, rows, width, 2))
}

void rms_norm(const char *x, size_t stride, const char *weight, char *y, float *inverse, size_t tokens, size_t rows,
              size_t width, float epsilon, int offset, int size) {
    if (offset)
        BY_SIZE(size, rms_norm_of(x, stride, weight, y, inverse, tokens, rows, width, epsilon, 1, 4),
                rms_norm_of(x, stride, weight, y, inverse, tokens, rows, width, epsilon, 1, 2))
    else
        BY_SIZE(size, rms_norm_of(x, stride, weight, y, inverse, tokens, rows, width, epsilon, 0, 4),
                rms_norm_of(x, stride, weight, y, inverse, tokens, rows, width, epsilon, 0, 2))
}

void rms_norm_gradient(const char *dy, const char *x, size_t stride, const char *weight, const float *inverse,
                       char *dx, float *dweight, size_t tokens, size_t rows, size_t width, int offset, int size) {
    if (offset)
        BY_SIZE(size,
                rms_norm_gradient_of(dy, x, stride, weight, inverse, dx, dweight, tokens, rows, width, 1, 4),
                rms_norm_gradient_of(dy, x, stride, weight, inverse, dx, dweight, tokens, rows, width, 1, 2))
    else
        BY_SIZE(size,
                rms_norm_gradient_of(dy, x, stride, weight, inverse, dx, dweight, tokens, rows, width, 0, 4),
                rms_norm_gradient_of(dy, x, stride, weight, inverse, dx, dweight, tokens, rows, width, 0, 2))
}

void layer_norm(const char *x, const char *weight, const char *bias, char *y, float *mean, float *inverse, size_t rows,
                size_t width, float epsilon, int size) {
    BY_SIZE(size, layer_norm_of(x, weight, bias, y, mean, inverse, rows, width, epsilon, 4),
            layer_norm_of(x, weight, bias, y, mean, inverse, rows, width, epsilon, 2))
}

void layer_norm_gradient(const char *dy, const char *x, const char *weight, const float *mean, const float *inverse,
                         char *dx, float *dweight, float *dbias, size_t rows, size_t width, int size) {
    BY_SIZE(size, layer_norm_gradient_of(dy, x, weight, mean, inverse, dx, dweight, dbias, rows, width, 4),
            layer_norm_gradient_of(dy, x, weight, mean, inverse, dx, dweight, dbias, rows, width, 2))
}

void softmax_statistics(const char *x, const int64_t *column, float *extreme, float *sum, float *at_column,
                        size_t rows, size_t columns, size_t width, float factor, int size) {
    BY_SIZE(size, softmax_statistics_of(x, column, extreme, sum, at_column, rows, columns, width, factor, 4),
            softmax_statistics_of(x, column, extreme, sum, at_column, rows, columns, width, factor, 2))
}

void softmax_gradient(char *x, const int64_t *column, const float *extreme, const float *weight,
                        const float *column_weight, size_t rows, size_t columns, size_t width, float factor, int size) {
    BY_SIZE(size, softmax_gradient_of(x, column, extreme, weight, column_weight, rows, columns, width, factor, 4),
            softmax_gradient_of(x, column, extreme, weight, column_weight, rows, columns, width, factor, 2))
}

/* Tile of a matrix product: C [HIGH, wide * LANES] = A B, or C += A B if `add`.
 *
 * Element [row, column] of A is at A[row * ra + column * ca]; rows of B [k, n] are `ldb` apart, those of C `ldc`.
 * Each element of C is one chain of multiply-adds in the order of k. */
#ifdef __AVX512F__
enum { HIGH = 8, WIDE = 2 };
#else
enum { HIGH = 4, WIDE = 1 };
#endif

INLINE void tile(int wide, int k, const float *A, int ra, int ca, const float *B, int ldb, float *C, int ldc, int add) {
    const int parts = wide * PARTS;
    Floats sum[HIGH][2 * PARTS];
    for (int i = 0; i < HIGH; ++i)
        for (int j = 0; j < parts; ++j) sum[i][j] = add ? *(const Floats *)(C + i * ldc + j * WIDTH) : all(0);
    for (int l = 0; l < k; ++l) {
        Floats b[2 * PARTS];
        for (int j = 0; j < parts; ++j) b[j] = *(const Floats *)(B + (size_t)l * ldb + j * WIDTH);
        for (int i = 0; i < HIGH; ++i) {
            const Floats a = all(A[i * ra + (size_t)l * ca]);
            for (int j = 0; j < parts; ++j) sum[i][j] += a * b[j];
        }
    }
    for (int i = 0; i < HIGH; ++i)
        for (int j = 0; j < parts; ++j) *(Floats *)(C + i * ldc + j * WIDTH) = sum[i][j];
}

/* Matrix product of `tile`s: C [m, n] = or += A [m, k] B [k, n]. m is a multiple of 8 and n of 16. */
static void product(int m, int n, int k, const float *A, int ra, int ca, const float *B, int ldb, float *C, int ldc,
                    int add) {
    int column = 0;
    for (; WIDE == 2 && column + 2 * LANES <= n; column += 2 * LANES)
        for (int row = 0; row < m; row += HIGH)
            tile(2, k, A + (size_t)row * ra, ra, ca, B + column, ldb, C + (size_t)row * ldc + column, ldc, add);
    for (; column < n; column += LANES)
        for (int row = 0; row < m; row += HIGH)
            tile(1, k, A + (size_t)row * ra, ra, ca, B + column, ldb, C + (size_t)row * ldc + column, ldc, add);
}

/* Tensor [s, b, heads, size] with its strides along s, b and heads, in elements. */
typedef struct { char *at; int64_t row, batch, head; } Heads;

/* Causal attention of `heads` query heads on `groups` key and value heads of size `head`.
 *
 * If `cosine` and `sine` [rows, head] are not null, queries and keys first get a rotary embedding of halves. A query
 * sees the last `window` keys up to its own, or all if that is 0. Unless `cap` is 0, scores x become
 * cap tanh(x / cap). If `sinks` [heads] is not null, each head has a further key of that score, whose value is zero.
 * Below, `width` is the size of a head padded with zeros to a multiple of LANES, and `keys` is the number of rows
 * padded to a multiple of PANEL. */
typedef struct {
    int64_t rows, batch, heads, groups, head;
    int element;
    float scale;
    const char *cosine, *sine;
    int64_t window;
    float cap;
    const float *sinks;
} Attention;

INLINE int up_to(int64_t x, int of) { return (int)((x + of - 1) / of * of); }

/* Read one row of a head into `row` [width] as fp32 times `factor`, with its rotary embedding if `turn`. */
INLINE void read_row(const Attention *a, const char *from, int64_t position, float *row, int turn, float factor) {
    const int head = (int)a->head, half = head / 2, size = a->element, width = up_to(head, LANES);
    for (int i = 0; i < width; i += WIDTH)
        *(Floats *)(row + i) = load_within(from + i * size, size, within(head, i));
    if (turn && a->cosine) {
        const char *cosine = a->cosine + position * head * size, *sine = a->sine + position * head * size;
        for (int i = 0; i < half; i += WIDTH) {
            const int some = within(half, i);
            const Floats c = load_within(cosine + i * size, size, some), s = load_within(sine + i * size, size, some);
            const Floats x = load_within((char *)(row + i), 4, some), y = load_within((char *)(row + half + i), 4, some);
            store_within((char *)(row + i), 4, some, x * c - y * s);
            store_within((char *)(row + half + i), 4, some, y * c + x * s);
        }
    }
    if (factor != 1)
        for (int i = 0; i < width; i += WIDTH) *(Floats *)(row + i) *= factor;
}

/* Write `row` times `factor`; undo the rotary embedding first if `turn`, as for a gradient. Overwrites `row`. */
INLINE void write_row(const Attention *a, char *to, int64_t position, float *row, int turn, float factor) {
    const int head = (int)a->head, half = head / 2, size = a->element;
    if (turn && a->cosine) {
        const char *cosine = a->cosine + position * head * size, *sine = a->sine + position * head * size;
        for (int i = 0; i < half; i += WIDTH) {
            const int some = within(half, i);
            const Floats c = load_within(cosine + i * size, size, some), s = load_within(sine + i * size, size, some);
            const Floats x = load_within((char *)(row + i), 4, some), y = load_within((char *)(row + half + i), 4, some);
            store_within((char *)(row + i), 4, some, x * c + y * s);
            store_within((char *)(row + half + i), 4, some, y * c - x * s);
        }
    }
    for (int i = 0; i < head; i += WIDTH)
        store_within(to + i * size, size, within(head, i), *(Floats *)(row + i) * factor);
}

/* Transpose rows [keys, width] in panels of PANEL rows, each of which becomes [width, PANEL]. */
static void panels(const float *rows, int keys, int width, float *into) {
    for (int first = 0; first < keys; first += PANEL, into += (size_t)width * PANEL)
        for (int row = 0; row < PANEL; ++row)
            for (int i = 0; i < width; ++i) into[(size_t)i * PANEL + row] = rows[(size_t)(first + row) * width + i];
}

static const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

/* Return the distance between rows of scores. With a power of two, all rows would share few sets of a cache. */
INLINE int score_stride(int keys) { return keys + LANES; }

/* Return how many floats `memory` of attention holds. `workspace_floats` in function_library.py returns the same. */
size_t attention_floats(int64_t rows, int64_t head) {
    const size_t keys = up_to(rows, PANEL), width = up_to(head, LANES);
    return 6 * keys * width + ROWS * (2 * (size_t)score_stride((int)keys) + 3 * width);
}

/* Return the first key that a query at `position` sees. */
INLINE int64_t first_key(const Attention *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* Rows of a block of ROWS queries from position `first` on that see one of the keys from `key` to `end`: rows from
 * `first_row` to `last_row`, exclusive. */
INLINE int first_row(int64_t first, int64_t key) { return key > first ? (int)(key - first) : 0; }
INLINE int last_row(const Attention *a, int64_t first, int64_t end) {
    const int64_t last = end - 1 + a->window - first;
    return a->window && last < ROWS ? (int)last : ROWS;
}

/* Scores [ROWS, keys] of a block of queries from `first` on with the keys from `begin` to `ends`. They are exponents
 * of 2. Tiles of masked scores are left as they are. */
static void scores(const Attention *a, int first, const float *query, const float *key_panels, int width, int begin,
                   int ends, float *into, int stride) {
    for (int key = begin; key < ends; key += PANEL) {
        const int row = first_row(first, key) / HIGH * HIGH, count = up_to(last_row(a, first, key + PANEL), HIGH) - row;
        product(count, PANEL, width, query + row * width, width, 1, key_panels + (size_t)key * width, PANEL,
                into + (size_t)row * stride + key, stride, 0);
    }
}

/* Product [ROWS, width] of weights [ROWS, keys] of a block, which are 0 where they are masked, and rows of keys. */
static void weighted_keys(const Attention *a, int first, const float *weights, int stride, const float *keys, int width,
                          int ends, float *into) {
    for (int row = 0; row < ROWS; row += HIGH) {
        const int begin = (int)first_key(a, first + row), after = first + row + HIGH, end = after < ends ? after : ends;
        product(HIGH, width, end - begin, weights + (size_t)row * stride + begin, stride, 1, keys + (size_t)begin * width,
                width, into + row * width, width, 0);
    }
}

/* Add to `into` [keys, width] the product of the transposed weights of a block and `rows` [ROWS, width]. */
static void add_weighted_rows(const Attention *a, int first, const float *weights, int stride, const float *rows,
                              int width, int begin, int ends, float *into) {
    for (int key = begin; key < ends; key += HIGH) {
        const int row = first_row(first, key), count = last_row(a, first, key + HIGH) - row;
        if (count > 0)
            product(HIGH, width, count, weights + (size_t)row * stride + key, 1, stride, rows + row * width, width,
                    into + (size_t)key * width, width, 1);
    }
}

/* Return the mask of the columns after `row`, for the vector that starts at `column`. */
INLINE Ints beyond(int column, int64_t row) {
    Ints lanes;
    for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] = column + lane;
    return lanes > (int)row;
}

/* Return x, for the vector that starts at `column`, or 0 where that is before `lowest` or after `position`. The latter
 * columns lie at or after `first`. */
INLINE Floats seen(Floats x, int column, int64_t lowest, int64_t first, int64_t position) {
    if (column + WIDTH > first) x = chosen(beyond(column, position), all(0), x);
    return column < lowest ? chosen(beyond(column, lowest - 1), x, all(0)) : x;
}

/* Return tanh(x log(2) / 2) with a relative error of 3e-7: t / (t + 2) with t = 2^x - 1. */
INLINE Floats hyperbolic_tangent(Floats x) {
    x = clamped(x, -64.0f, 64.0f);
    const Floats power = (Floats)(split(&x) + (Ints)all(1.0f));
    const Floats t = power_slope(x) * x * power + (power - 1.0f);
    return t / (t + 2.0f);
}

/* Replace scores of a row, which are exponents of 2, by the capped ones. */
INLINE void cap_scores(float *row, int begin, int ends, float cap) {
    const float most = cap * LOG2_E, factor = 2 / cap;
    for (int j = begin; j < ends; j += WIDTH)
        *(Floats *)(row + j) = hyperbolic_tangent(*(Floats *)(row + j) * factor) * most;
}

/* Zero the scores before the vector that contains `lowest`; return its first column. */
INLINE int zero_before(float *row, int begin, int ends, int64_t lowest) {
    if (lowest < begin + LANES) return begin;
    const int start = lowest < ends ? (int)lowest / LANES * LANES : ends;
    memset(row + begin, 0, sizeof(float) * (start - begin));
    return start;
}

/* Replace the scores of a row from `begin` to `ends` by 2^(score - largest), and return their sum.
 *
 * Scores before `lowest` and after `position` are masked. The latter lie at or after column `first`. */
INLINE float powers(float *row, int begin, int ends, int64_t lowest, int64_t first, int64_t position, float *largest) {
    Floats most = all(-INFINITY);
    const int start = zero_before(row, begin, ends, lowest);
    for (int j = start; j < lowest && j < ends; j += WIDTH)
        *(Floats *)(row + j) = chosen(beyond(j, lowest - 1), *(Floats *)(row + j), all(-INFINITY));
    for (int j = start; j < ends; j += WIDTH) {
        Floats x = *(Floats *)(row + j);
        if (j + WIDTH > first) *(Floats *)(row + j) = x = chosen(beyond(j, position), all(-INFINITY), x);
        most = chosen(x > most, x, most);
    }
    *largest = most[0];
    for (int lane = 1; lane < WIDTH; ++lane) *largest = most[lane] > *largest ? most[lane] : *largest;
    Sum sum = {0};
    for (int j = start; j < ends; j += LANES)
        for (int part = 0; part < PARTS; ++part) {
            const int column = j + part * WIDTH;
            Floats p = power_of_2(*(Floats *)(row + column) - *largest);
            *(Floats *)(row + column) = p = seen(p, column, lowest, first, position);
            sum.part[part] += p;
        }
    return total(sum);
}

/* Return the factor that turns the powers into probabilities; with a sink it includes the rescaling. `whole` is the
 * sum of the powers 2^(score - largest). `log_sum` receives the binary logarithm of the softmax denominator. */
INLINE float inverse_sum(const Attention *a, int64_t head, float whole, float largest, float *log_sum) {
    float scale = 1;
    if (a->sinks) {
        const float sink = a->sinks[head] * LOG2_E, most = sink > largest ? sink : largest;
        scale = power_of_2(all(largest - most))[0];
        whole = whole * scale + power_of_2(all(sink - most))[0];
        largest = most;
    }
    *log_sum = largest + log2f(whole);
    return scale / whole;
}

/* Attention. `log_sums` [batch, heads, rows] receives the binary logarithm of each softmax denominator, which the
 * backward pass needs. */
void attend(const Attention *a, const Heads *q, const Heads *k, const Heads *v, const Heads *o, float *log_sums,
            float *memory) {
    const int rows = (int)a->rows, keys = up_to(rows, PANEL), width = up_to(a->head, LANES), size = a->element;
    const int shared = (int)(a->heads / a->groups), stride = score_stride(keys);
    float *values = memory, *key_panels = values + (size_t)keys * width, *query = key_panels + (size_t)keys * width;
    float *output = query + ROWS * width, *chance = output + ROWS * width, *plain = chance + (size_t)ROWS * stride;
    for (int64_t pair = 0; pair < a->batch * a->groups; ++pair) {
        const int64_t batch = pair / a->groups, group = pair % a->groups;
        memset(values, 0, sizeof(float) * keys * width);
        memset(plain, 0, sizeof(float) * keys * width);
        for (int row = 0; row < rows; ++row) {
            read_row(a, v->at + (row * v->row + batch * v->batch + group * v->head) * size, row, values + (size_t)row * width, 0, 1);
            read_row(a, k->at + (row * k->row + batch * k->batch + group * k->head) * size, row, plain + (size_t)row * width, 1, 1);
        }
        panels(plain, keys, width, key_panels);
        for (int64_t head = group * shared; head < (group + 1) * shared; ++head)
            for (int first = 0; first < rows; first += ROWS) {
                const int count = rows - first < ROWS ? rows - first : ROWS, ends = up_to(first + count, PANEL);
                const int begin = (int)first_key(a, first) / PANEL * PANEL;
                memset(query, 0, sizeof(float) * ROWS * width);
                for (int i = 0; i < count; ++i)
                    read_row(a, q->at + ((first + i) * q->row + batch * q->batch + head * q->head) * size, first + i,
                             query + i * width, 1, a->scale * LOG2_E);
                scores(a, first, query, key_panels, width, begin, ends, chance, stride);
                float inverse[ROWS];
                for (int i = 0; i < ROWS; ++i) {
                    float *row = chance + (size_t)i * stride;
                    float largest;
                    if (a->cap) cap_scores(row, begin, ends, a->cap);
                    const float whole = powers(row, begin, ends, first_key(a, first + i), first, first + i, &largest);
                    float log_sum;
                    inverse[i] = inverse_sum(a, head, whole, largest, &log_sum);
                    if (i < count) log_sums[((batch * a->heads + head) * rows) + first + i] = log_sum;
                }
                weighted_keys(a, first, chance, stride, values, width, ends, output);
                for (int i = 0; i < count; ++i)
                    write_row(a, o->at + ((first + i) * o->row + batch * o->batch + head * o->head) * size, first + i,
                              output + i * width, 0, inverse[i]);
            }
    }
}

/* Gradients of `attend`: dq, dk and dv of the output's gradient d. */
void attend_gradient(const Attention *a, const Heads *q, const Heads *k, const Heads *v, const Heads *o,
                     const Heads *d, const Heads *dq, const Heads *dk, const Heads *dv, const float *log_sums,
                     float *memory) {
    const int rows = (int)a->rows, keys = up_to(rows, PANEL), width = up_to(a->head, LANES), size = a->element;
    const int shared = (int)(a->heads / a->groups), stride = score_stride(keys);
    const size_t whole = (size_t)keys * width;
    float *plain = memory, *key_panels = plain + whole, *value_panels = key_panels + whole;
    float *key_sum = value_panels + whole, *value_sum = key_sum + whole, *values = value_sum + whole;
    float *query = values + whole, *gradient = query + ROWS * width, *output = gradient + ROWS * width;
    float *chance = output + ROWS * width, *change = chance + (size_t)ROWS * stride;
    for (int64_t pair = 0; pair < a->batch * a->groups; ++pair) {
        const int64_t batch = pair / a->groups, group = pair % a->groups;
        memset(plain, 0, sizeof(float) * whole);
        memset(values, 0, sizeof(float) * whole);
        memset(key_sum, 0, sizeof(float) * whole);
        memset(value_sum, 0, sizeof(float) * whole);
        for (int row = 0; row < rows; ++row) {
            read_row(a, v->at + (row * v->row + batch * v->batch + group * v->head) * size, row, values + (size_t)row * width, 0, 1);
            read_row(a, k->at + (row * k->row + batch * k->batch + group * k->head) * size, row, plain + (size_t)row * width, 1, 1);
        }
        panels(plain, keys, width, key_panels);
        panels(values, keys, width, value_panels);
        for (int64_t head = group * shared; head < (group + 1) * shared; ++head)
            for (int first = 0; first < rows; first += ROWS) {
                const int count = rows - first < ROWS ? rows - first : ROWS, ends = up_to(first + count, PANEL);
                const int begin = (int)first_key(a, first) / PANEL * PANEL;
                const float inverse_cap = 1 / (a->cap * LOG2_E);
                float delta[ROWS] = {0};
                memset(query, 0, sizeof(float) * ROWS * width);
                memset(gradient, 0, sizeof(float) * ROWS * width);
                for (int i = 0; i < count; ++i) {
                    const int64_t row = first + i;
                    read_row(a, q->at + (row * q->row + batch * q->batch + head * q->head) * size, row, query + i * width, 1, a->scale * LOG2_E);
                    read_row(a, d->at + (row * d->row + batch * d->batch + head * d->head) * size, row, gradient + i * width, 0, 1);
                    read_row(a, o->at + (row * o->row + batch * o->batch + head * o->head) * size, row, output, 0, 1);
                    Sum sum = {0};
                    for (int j = 0; j < width; j += LANES)
                        for (int part = 0; part < PARTS; ++part) {
                            const int at = j + part * WIDTH;
                            sum.part[part] += *(Floats *)(output + at) * *(Floats *)(gradient + i * width + at);
                        }
                    delta[i] = total(sum);
                }
                scores(a, first, query, key_panels, width, begin, ends, chance, stride);
                scores(a, first, gradient, value_panels, width, begin, ends, change, stride);
                for (int i = 0; i < ROWS; ++i) {
                    float *p = chance + (size_t)i * stride, *c = change + (size_t)i * stride;
                    const float log_sum = i < count ? log_sums[(batch * a->heads + head) * rows + first + i] : INFINITY;
                    const int64_t lowest = first_key(a, first + i);
                    const int start = zero_before(p, begin, ends, lowest);
                    zero_before(c, begin, ends, lowest);
                    if (a->cap) cap_scores(p, start, ends, a->cap);
                    for (int j = start; j < ends; j += WIDTH) {
                        const Floats score = *(Floats *)(p + j);
                        Floats x = i < count ? power_of_2(score - log_sum) : all(0);
                        Floats slope = x * (*(Floats *)(c + j) - delta[i]);
                        if (a->cap) {
                            const Floats tanh_value = score * inverse_cap;
                            slope *= 1.0f - tanh_value * tanh_value;
                        }
                        *(Floats *)(p + j) = seen(x, j, lowest, first, first + i);
                        *(Floats *)(c + j) = seen(slope, j, lowest, first, first + i);
                    }
                }
                weighted_keys(a, first, change, stride, plain, width, ends, output);
                for (int i = 0; i < count; ++i)
                    write_row(a, dq->at + ((first + i) * dq->row + batch * dq->batch + head * dq->head) * size, first + i,
                              output + i * width, 1, a->scale);
                add_weighted_rows(a, first, change, stride, query, width, begin, ends, key_sum);
                add_weighted_rows(a, first, chance, stride, gradient, width, begin, ends, value_sum);
            }
        for (int row = 0; row < rows; ++row) {
            write_row(a, dk->at + (row * dk->row + batch * dk->batch + group * dk->head) * size, row, key_sum + (size_t)row * width, 1, LN_2);
            write_row(a, dv->at + (row * dv->row + batch * dv->batch + group * dv->head) * size, row, value_sum + (size_t)row * width, 0, 1);
        }
    }
}

/* Cache of keys and values in pages of PANEL tokens.
 *
 * A page holds for each group the keys [width, PANEL] after the rotary embedding, with `key_element` bytes each, and
 * the values [PANEL, width] in the type of `element`. Row i of a forward pass is the token at `positions[i]` of the
 * text `texts[i]`; it is unused if that is negative. `rotations[i]` is its row in the tables of the rotary embedding.
 * `tables` [texts, text_pages] lists the pages of each text. */
typedef struct {
    Attention attention;
    int64_t text_pages;
    int key_element;
    char *keys, *values;
    const int64_t *texts, *positions, *rotations, *tables;
} Paged;

INLINE size_t page_of(const Paged *p, int64_t text, int64_t number, int64_t group) {
    const int64_t page = p->tables[text * p->text_pages + number];
    return (page * p->attention.groups + group) * PANEL * up_to(p->attention.head, LANES);
}

/* Scores of `high` queries with all keys of a page, computed as in `tile`. */
INLINE void page_scores(int high, int wide, int size, int width, const float *query, const char *page, float *into, int keys) {
    const int parts = wide * PARTS;
    for (int column = 0; column < PANEL; column += wide * LANES) {
        Floats sum[HIGH][PANEL / WIDTH];
        for (int i = 0; i < high; ++i)
            for (int j = 0; j < parts; ++j) sum[i][j] = all(0);
        for (int l = 0; l < width; ++l) {
            Floats b[PANEL / WIDTH];
            for (int j = 0; j < parts; ++j) b[j] = load(page + ((size_t)l * PANEL + column + j * WIDTH) * size, size);
            for (int i = 0; i < high; ++i) {
                const Floats a = all(query[i * width + l]);
                for (int j = 0; j < parts; ++j) sum[i][j] += a * b[j];
            }
        }
        for (int i = 0; i < high; ++i)
            for (int j = 0; j < parts; ++j) *(Floats *)(into + (size_t)i * keys + column + j * WIDTH) = sum[i][j];
    }
}

/* Products of the probabilities with the values of a text from `begin` to `ends`: wide * LANES columns from `column`. */
INLINE void page_values(int high, int wide, const Paged *p, int64_t text, int64_t group, int column, int begin, int ends,
                        const float *chance, int keys, float *output) {
    const int width = up_to(p->attention.head, LANES), size = p->attention.element, parts = wide * PARTS;
    Floats sum[HIGH][4 * PARTS];
    for (int i = 0; i < high; ++i)
        for (int j = 0; j < parts; ++j) sum[i][j] = all(0);
    for (int first = begin; first < ends; first += PANEL) {
        const char *page = p->values + (page_of(p, text, first / PANEL, group) + column) * size;
        const int some = ends - first < PANEL ? ends - first : PANEL;
        for (int l = 0; l < some; ++l, page += (size_t)width * size) {
            Floats b[4 * PARTS];
            for (int j = 0; j < parts; ++j) b[j] = load(page + (size_t)j * WIDTH * size, size);
            for (int i = 0; i < high; ++i) {
                const Floats a = all(chance[(size_t)i * keys + first + l]);
                for (int j = 0; j < parts; ++j) sum[i][j] += a * b[j];
            }
        }
    }
    for (int i = 0; i < high; ++i)
        for (int j = 0; j < parts; ++j) *(Floats *)(output + i * width + column + j * WIDTH) = sum[i][j];
}

/* Attention of `high` fp32 queries of one text, computed as in `attend`, with their heads. `positions` ends with the
 * largest. */
INLINE void attend_some(int high, const Paged *p, int64_t text, int64_t group, const float *query,
                        const int64_t *positions, const int64_t *heads, float *chance, float *output, float *inverse) {
    const int width = up_to(p->attention.head, LANES), ends = (int)positions[high - 1] + 1, keys = up_to(ends, PANEL);
    const int size = p->key_element, begin = (int)first_key(&p->attention, positions[0]) / PANEL * PANEL;
    for (int first = begin; first < ends; first += PANEL) {
        const char *page = p->keys + page_of(p, text, first / PANEL, group) * size;
        if (size == 4) page_scores(high, high == 1 ? 2 : WIDE, 4, width, query, page, chance + first, keys);
        else page_scores(high, high == 1 ? 2 : WIDE, 2, width, query, page, chance + first, keys);
    }
    for (int i = 0; i < high; ++i) {
        float largest, *row = chance + (size_t)i * keys;
        const int64_t lowest = first_key(&p->attention, positions[i]);
        if (p->attention.cap) cap_scores(row, begin, keys, p->attention.cap);
        const float whole = powers(row, begin, keys, lowest, positions[0], positions[i], &largest);
        float log_sum;
        inverse[i] = inverse_sum(&p->attention, heads[i], whole, largest, &log_sum);
    }
    int column = 0;
    if (high == 1)
        for (; column + 4 * LANES <= width; column += 4 * LANES)
            page_values(high, 4, p, text, group, column, begin, ends, chance, keys, output);
    for (; column < width; column += LANES) page_values(high, 1, p, text, group, column, begin, ends, chance, keys, output);
}

/* Store keys and values of all rows in their pages. Then each row attends to the tokens of its text up to itself.
 *
 * Rows of a text are adjacent and in order. `memory` holds HIGH * (text_pages * PANEL + 2 * width) floats. */
void attend_paged(const Paged *p, const Heads *q, const Heads *k, const Heads *v, const Heads *o, float *memory) {
    const Attention *a = &p->attention;
    const int width = up_to(a->head, LANES), size = a->element, key_size = p->key_element;
    const int64_t shared = a->heads / a->groups;
    float *query = memory, *output = query + HIGH * width, *chance = output + HIGH * width;
    for (int64_t row = 0; row < a->rows; ++row)
        for (int64_t group = 0; p->texts[row] >= 0 && group < a->groups; ++group) {
            const int64_t position = p->positions[row], lane = position % PANEL;
            const size_t page = page_of(p, p->texts[row], position / PANEL, group);
            read_row(a, k->at + (row * k->row + group * k->head) * size, p->rotations[row], query, 1, 1);
            for (int i = 0; i < width; ++i)
                store_some(p->keys + (page + (size_t)i * PANEL + lane) * key_size, key_size, 1, all(query[i]));
            read_row(a, v->at + (row * v->row + group * v->head) * size, position, query, 0, 1);
            for (int i = 0; i < width; i += WIDTH)
                store(p->values + (page + (size_t)lane * width + i) * size, size, *(Floats *)(query + i));
        }
    for (int64_t first = 0, rows; first < a->rows; first += rows) {
        const int64_t text = p->texts[first];
        for (rows = 1; first + rows < a->rows && p->texts[first + rows] == text;) ++rows;
        /* Queries of a group are ordered by row, then head, so that the last one has the largest position. */
        for (int64_t group = 0; text >= 0 && group < a->groups; ++group)
            for (int64_t next = 0, some; next < rows * shared; next += some) {
                some = rows * shared - next < HIGH ? 1 : HIGH;
                int64_t positions[HIGH], heads[HIGH];
                float inverse[HIGH];
                for (int64_t i = 0; i < some; ++i) {
                    const int64_t row = first + (next + i) / shared, head = group * shared + (next + i) % shared;
                    positions[i] = p->positions[row];
                    heads[i] = head;
                    read_row(a, q->at + (row * q->row + head * q->head) * size, p->rotations[row], query + i * width, 1, a->scale * LOG2_E);
                }
                if (some == HIGH) attend_some(HIGH, p, text, group, query, positions, heads, chance, output, inverse);
                else attend_some(1, p, text, group, query, positions, heads, chance, output, inverse);
                for (int64_t i = 0; i < some; ++i) {
                    const int64_t row = first + (next + i) / shared, head = group * shared + (next + i) % shared;
                    write_row(a, o->at + (row * o->row + head * o->head) * size, positions[i], output + i * width, 0, inverse[i]);
                }
            }
        for (int64_t row = first; text < 0 && row < first + rows; ++row)
            for (int64_t head = 0; head < a->heads; ++head)
                memset(o->at + (row * o->row + head * o->head) * size, 0, a->head * size);
    }
}

/* TALL: output features that `few_outputs` computes at a time, for at most two vectors of rows.
 * LINE: floats of a cache line. */
#if defined __AVX__ && !defined __AVX512F__
enum { TALL = 6, LINE = 16 };
#else
enum { TALL = 12, LINE = 16 };
#endif

/* Compute TALL output features y = x w^T + bias, with the transposed rows x^T in `columns` [k, wide * WIDTH].
 *
 * `w` is [TALL, k], and rows of y are `n` apart. Unless `ahead` is 0, w at that distance is prefetched. */
INLINE void few_outputs(int wide, int rows, const float *columns, const float *w, const float *bias, float *y,
                        int64_t n, int64_t k, int64_t block, int64_t ahead) {
    Floats sum[TALL][2];
    for (int64_t first = 0; first < k; first += block) {
        const int64_t end = first + block < k ? first + block : k;
        Floats part[TALL][2];
        for (int j = 0; j < TALL; ++j)
            for (int i = 0; i < wide; ++i) part[j][i] = all(0);
        for (int64_t from = first; from < end; from += LINE) {
            const int64_t to = from + LINE < end ? from + LINE : end;
            for (int j = 0; ahead && j < TALL; ++j) __builtin_prefetch(w + ahead + j * k + from);
            for (int64_t l = from; l < to; ++l) {
                Floats x[2];
                for (int i = 0; i < wide; ++i) x[i] = *(const Floats *)(columns + (l * wide + i) * WIDTH);
                for (int j = 0; j < TALL; ++j) {
                    const Floats a = all(w[j * k + l]);
                    for (int i = 0; i < wide; ++i) part[j][i] += a * x[i];
                }
            }
        }
        for (int j = 0; j < TALL; ++j)
            for (int i = 0; i < wide; ++i) {
                if (first) sum[j][i] += part[j][i];
                else if (bias) sum[j][i] = part[j][i] + bias[j];
                else sum[j][i] = part[j][i];
            }
    }
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < TALL; ++j) y[i * n + j] = sum[j][i / WIDTH][i % WIDTH];
}

/* Call `few_outputs` for all m rows, in groups of at most two vectors. */
INLINE void few_of_all(const float *columns, const float *w, const float *bias, float *y, int64_t m, int64_t n,
                       int64_t k, int64_t block, int64_t ahead) {
    for (int64_t row = 0; row < m; row += 2 * WIDTH, columns += 2 * WIDTH * k, y += 2 * WIDTH * n, ahead = 0) {
        const int rows = m - row < 2 * WIDTH ? (int)(m - row) : 2 * WIDTH;
        if (rows <= WIDTH) few_outputs(1, rows, columns, w, bias, y, n, k, block, ahead);
        else few_outputs(2, rows, columns, w, bias, y, n, k, block, ahead);
    }
}

/* Linear layer of few rows in fp32: y [m, n] = x [m, k] w^T + bias, with w [n, k]. w is read once.
 *
 * Each `block` of input features is one chain of multiply-adds in their order. The sums of the blocks are added in
 * order, the bias to the first one. `memory` holds k floats for each row, with m padded to a multiple of 32.
 *
 * n must be at least twelve: GCC splits the multiply-adds of a single chain on AMD processors, but not those of
 * several chains side by side. */
void few_rows(const float *x, const float *w, const float *bias, float *y, float *memory, int64_t m, int64_t n, int64_t k,
              int64_t block) {
    float *columns = memory;
    for (int64_t row = 0; row < m; row += 2 * WIDTH, columns += 2 * WIDTH * k) {
        const int rows = m - row < 2 * WIDTH ? (int)(m - row) : 2 * WIDTH, width = rows <= WIDTH ? WIDTH : 2 * WIDTH;
        for (int64_t l = 0; l < k; ++l)
            for (int i = 0; i < width; ++i) columns[l * width + i] = i < rows ? x[(row + i) * k + l] : 0;
    }
    for (int64_t next = 0; next < n; next += TALL) {
        /* The last group may overlap the one before; it writes the same values again. */
        const int64_t j = next + TALL <= n ? next : n - TALL, ahead = next + 2 * TALL <= n ? TALL * k : 0;
        few_of_all(memory, w + j * k, bias ? bias + j : 0, y + j, m, n, k, block, ahead);
    }
}
