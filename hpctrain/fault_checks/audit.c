/* Sums over the rows and columns of matrices, by which an audit checks matrix products. Each function reads its
 * matrix once. Rows are `stride` elements apart. Elements have `size` bytes: 4 for fp32, 2 for bf16. All other
 * arguments are fp32. A run compiles this file for its own processor. */

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 8, CHAINS = 4, HEIGHT = 4 };

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE Floats load(const char *at, int size) {
    if (size == 4) return *(const Floats *)at;
    return (Floats)(__builtin_convertvector(*(const Halves *)at, Words) << 16);
}

INLINE float load_one(const char *at, int size) {
    float x;
    if (size == 4) memcpy(&x, at, 4);
    else {
        uint16_t half;
        memcpy(&half, at, 2);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&x, &bits, 4);
    }
    return x;
}

INLINE float total(Floats x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += x[lane];
    return sum;
}

INLINE void rows_of(const char *x, int64_t rows, int64_t columns, int64_t stride, const float *vector,
                    const float *weights, float *products, float *squares, int size, int weighted) {
    for (int64_t i = 0; i < rows; ++i, x += stride * size) {
        Floats p[CHAINS] = {{0}}, q[CHAINS] = {{0}};
        int64_t j = 0;
        for (; j + CHAINS * LANES <= columns; j += CHAINS * LANES)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; ++c) {
                Floats y = load(x + (j + c * LANES) * size, size);
                p[c] += y * *(const Floats *)(vector + j + c * LANES);
                if (weighted) q[c] += y * y * *(const Floats *)(weights + j + c * LANES);
                else q[c] += y * y;
            }
        float product = total((p[0] + p[1]) + (p[2] + p[3])), square = total((q[0] + q[1]) + (q[2] + q[3]));
        for (; j < columns; ++j) {
            float y = load_one(x + j * size, size);
            product += y * vector[j];
            square += weighted ? y * y * weights[j] : y * y;
        }
        products[i] = product;
        squares[i] = square;
    }
}

/* For each row of x: its product with `vector`, and the sum of its squares times `weights` (null for ones). */
void audit_rows(const char *x, int64_t rows, int64_t columns, int64_t stride, const float *vector,
                const float *weights, float *products, float *squares, int size) {
    if (size == 4 && weights) rows_of(x, rows, columns, stride, vector, weights, products, squares, 4, 1);
    else if (size == 4) rows_of(x, rows, columns, stride, vector, weights, products, squares, 4, 0);
    else if (weights) rows_of(x, rows, columns, stride, vector, weights, products, squares, 2, 1);
    else rows_of(x, rows, columns, stride, vector, weights, products, squares, 2, 0);
}

INLINE void columns_of(const char *x, int64_t rows, int64_t columns, int64_t stride, const float *vector,
                       const float *weights, float *products, float *squares, int size) {
    for (int64_t i = 0; i < rows; i += HEIGHT) {
        int some = rows - i < HEIGHT ? (int)(rows - i) : HEIGHT;
        float a[HEIGHT] = {0}, b[HEIGHT] = {0};
        const char *row[HEIGHT];
        for (int r = 0; r < HEIGHT; ++r) {
            row[r] = x + (i + (r < some ? r : 0)) * stride * size;
            if (r < some) a[r] = vector[i + r], b[r] = weights ? weights[i + r] : 1.0f;
        }
        int64_t j = 0;
        for (; j + LANES <= columns; j += LANES) {
            Floats p = *(Floats *)(products + j), q = *(Floats *)(squares + j);
            for (int r = 0; r < HEIGHT; ++r) {
                Floats y = load(row[r] + j * size, size);
                p += y * a[r];
                q += y * y * b[r];
            }
            *(Floats *)(products + j) = p;
            *(Floats *)(squares + j) = q;
        }
        for (; j < columns; ++j)
            for (int r = 0; r < some; ++r) {
                float y = load_one(row[r] + j * size, size);
                products[j] += y * a[r];
                squares[j] += y * y * b[r];
            }
    }
}

/* For each column of x, add its product with `vector` to `products`, and the sum of its squares times `weights`
 * (null for ones) to `squares`. */
void audit_columns(const char *x, int64_t rows, int64_t columns, int64_t stride, const float *vector,
                   const float *weights, float *products, float *squares, int size) {
    if (size == 4) columns_of(x, rows, columns, stride, vector, weights, products, squares, 4);
    else columns_of(x, rows, columns, stride, vector, weights, products, squares, 2);
}

/* Write the sums of the rows of a matrix with `along`, and add the sums of its columns with `across`. */
void audit_matrix(const char *x, int64_t rows, int64_t columns, int64_t stride, const float *along,
                  const float *across, float *of_rows, float *row_squares, float *of_columns,
                  float *column_squares, int size) {
    for (int64_t i = 0; i < rows; i += HEIGHT) {
        int64_t some = rows - i < HEIGHT ? rows - i : HEIGHT;
        const char *part = x + i * stride * size;
        audit_rows(part, some, columns, stride, along, 0, of_rows + i, row_squares + i, size);
        audit_columns(part, some, columns, stride, across + i, 0, of_columns, column_squares, size);
    }
}

/* Raise `worst` to the largest error of a row relative to its tolerance (AuditKernels.judge explains it).
 *
 * `limit` is the largest magnitude that certainly does not overflow. `accumulated` and `rounded` are the ratios of
 * bounds to magnitudes for accumulation and for additional roundings (ErrorBounds.factors). */
void audit_judge(int64_t rows, const float *expected, const float *there, const float *added, const float *squares,
                 int64_t depth, float accumulated, float rounded, float limit, int alike,
                 float least, float coherent, float biased, float *worst) {
    float common = 0;
    if (alike) {
        double ratios = 0;
        for (int64_t i = 0; i < rows; ++i) {
            float sum = added[i], most = sum * (float)depth;
            float square = squares[i] <= most ? squares[i] : most;
            if (sum > 0 && square / sum < FLT_MAX) ratios += sqrtf(square / sum);
        }
        common = (float)(ratios / (double)rows);
    }
    for (int64_t i = 0; i < rows; ++i) {
        float sum = added[i], size = sqrtf(sum), most = sqrtf(sum * (float)depth);
        float own = sqrtf(squares[i]);
        if (!(own <= most)) own = most;
        if (own < common * size) own = common * size;
        float beyond = own - coherent * size;
        float accumulates = size + own + (beyond > 0 ? biased * beyond : 0);
        float tolerance = accumulated * accumulates + rounded * (alike ? size + own : own) + least;
        float off = fabsf(expected[i] - there[i]) / tolerance;
        if (!(fabsf(there[i]) <= FLT_MAX)) off = most < limit ? INFINITY : 0;
        if (off > *worst) *worst = off;
    }
}
