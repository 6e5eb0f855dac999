// The drafter of strategy auto: suffix matches and recycled continuations, blended (called by drafting.py).
//
// It gives exactly the proposals of AutoDrafter in workers/drafters/auto.py, whose state is too many small objects to
// walk in the time of a step. Not thread safe: the engine's thread owns it.

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "drafting_growth.h"
#include "drafting_suffix.h"
#include "drafting_table.h"

namespace {

constexpr double LEAST_KEPT = 0.01;  // candidates below this probability are not kept

// Reads numbers that Python has put one behind the other.
class Reader {
  public:
    explicit Reader(const int64_t* numbers) : next_(numbers) {}

    int64_t number() { return *next_++; }

    // Valid until the next call with the same `into`.
    const Token* tokens(int64_t count, std::vector<Token>& into) {
        into.assign(next_, next_ + count);
        next_ += count;
        return into.data();
    }

    const int64_t* numbers(int64_t count) {
        const int64_t* first = next_;
        next_ += count;
        return first;
    }

  private:
    const int64_t* next_;
};

// The samples of one prompt share an index of the prompt and of all their outputs.
struct Group {
    SuffixIndex index{/*shortest_key=*/1};
    int64_t members = 0;
};

struct Sample {
    std::pair<const std::string, Group>* group;
    Document* document;  // its tokens as far as they are indexed
    int64_t prompt_length;
    Walk walk;
};

class Drafter {
  public:
    Drafter(int64_t contexts, int64_t finished_tokens)
        : blend_(static_cast<size_t>(contexts)), finished_(/*shortest_key=*/2, finished_tokens) {}

    void start(int64_t key, const std::string& name, Reader tokens, int64_t count, int64_t prompt_length) {
        auto& group = *groups_.try_emplace(name).first;
        // The first sample of a group brings the prompt to the index, the others only what they have beyond it.
        const int64_t first = group.second.members++ ? std::min(prompt_length, count) : 0;
        const Token* all = tokens.tokens(count, tokens_);
        Document* document = group.second.index.add(all, first);
        group.second.index.extend(document, all + first, count - first);
        Sample& sample = samples_[key];
        sample.group = &group, sample.document = document, sample.prompt_length = prompt_length;
    }

    // Each sample: key, most rows (at least one), number of tokens that are not yet indexed, these tokens. `ends[i]` is
    // where the nodes of sample i end.
    int64_t propose(Reader input, int64_t count, double min_score, int64_t* ends, Nodes nodes) {
        const double floor = std::max(min_score, MIN_SCORE);
        least_ = std::max(floor * MARGIN, MIN_CLAIM);
        int64_t total = 0;
        for (int64_t i = 0; i < count; ++i) {
            Sample& sample = samples_.at(input.number());
            const int64_t rows = input.number();
            const int64_t added = input.number();
            extend(sample, input.tokens(added, tokens_), added);
            walk_from(sample, sample.document->length());
            const int64_t grown = blend_.grow(sample.walk, rows, floor, nodes);
            nodes.tokens += grown, nodes.parents += grown, nodes.sources += grown, nodes.scores += grown;
            ends[i] = total += grown;
        }
        return total;
    }

    // Each observation: key, number of tokens that are not yet indexed, length of the path, number of nodes; then these
    // tokens, the path, the emitted tokens, tokens and parents of the nodes. The candidates of all rows follow on one
    // another.
    void observe(Reader input, int64_t count, const int64_t* ids_RK, const float* probabilities_RK, int64_t k) {
        for (int64_t i = 0; i < count; ++i) {
            Sample& sample = samples_.at(input.number());
            const int64_t added = input.number();
            const int64_t length = input.number();
            const int64_t size = input.number();
            const Token* tokens = input.tokens(added, tokens_);
            const int64_t* path = input.numbers(length);
            const Token* emitted = input.tokens(length, emitted_);
            const int64_t* node_tokens = input.numbers(size);
            const int64_t* parents = input.numbers(size);
            const Context before = grade(sample, tokens, added, emitted, length);
            keep_candidates(ids_RK, probabilities_RK, 1 + size, k);
            learn(before, path, length, node_tokens, parents, size);
            blend_.frequent.add(emitted, length);
            ids_RK += (1 + size) * k, probabilities_RK += (1 + size) * k;
        }
    }

    // `tokens`: those that are not yet indexed. Only the index of finished outputs gets them.
    void finish(int64_t key, Reader tokens, int64_t count) {
        const auto found = samples_.find(key);
        const Sample& sample = found->second;
        std::vector<Token> all = sample.document->tokens;
        const Token* added = tokens.tokens(count, tokens_);
        all.insert(all.end(), added, added + count);
        const int64_t start = std::max<int64_t>(0, sample.prompt_length - MAX_MATCH);
        const auto end = static_cast<int64_t>(all.size()), first = std::min(sample.prompt_length, end);
        if (--sample.group->second.members == 0) groups_.erase(groups_.find(sample.group->first));
        samples_.erase(found);
        Document* document = finished_.add(all.data() + start, first - start);
        finished_.extend(document, all.data() + first, end - first);
    }

  private:
    void extend(Sample& sample, const Token* tokens, int64_t count) {
        sample.group->second.index.extend(sample.document, tokens, count);
    }

    // A new walk from the first `end` tokens of a sample.
    void walk_from(Sample& sample, int64_t end) {
        Walk& walk = sample.walk;
        walk.clear();
        const Token* tokens = sample.document->tokens.data();
        sample.group->second.index.matches(tokens, end, MAX_MATCH, sample.document, walk.matches);
        const size_t own = walk.matches.size();
        finished_.matches(tokens, end, MAX_MATCH, nullptr, walk.matches);
        for (size_t i = own; i < walk.matches.size(); ++i) {
            walk.held.push_back(walk.matches[i].document->shared_from_this());
        }
        blend_.begin(walk, Context::of(tokens, end), least_);
        walk.end = end;
    }

    // Grade the claims for emitted tokens and index what is not yet indexed. Returns the context before them.
    Context grade(Sample& sample, const Token* tokens, int64_t added, const Token* emitted, int64_t count) {
        const int64_t before = sample.document->length() + added - count;
        const int64_t unseen = std::clamp<int64_t>(before - sample.document->length(), 0, added);
        extend(sample, tokens, unseen);
        // Nothing is kept where no draft was wanted, and what is kept is old where that step went by unobserved.
        if (sample.walk.end != before) walk_from(sample, before);
        blend_.grade(sample.walk, emitted, count, least_);
        const Context context = sample.walk.places[0].context;
        sample.walk.clear();
        extend(sample, tokens + unseen, added - unseen);
        return context;
    }

    void keep_candidates(const int64_t* ids_RK, const float* probabilities_RK, int64_t rows, int64_t k) {
        candidates_.resize(rows);
        for (Candidates& row : candidates_) {
            row.count = static_cast<int32_t>(k);
            while (row.count > 0 && probabilities_RK[row.count - 1] < LEAST_KEPT) --row.count;
            std::copy(ids_RK, ids_RK + row.count, row.token.begin());
            std::copy(probabilities_RK, probabilities_RK + row.count, row.probability.begin());
            ids_RK += k, probabilities_RK += k;
        }
    }

    // Store the candidates of all rows of a step. Rows of the accepted path come last: of rows with equal keys, theirs
    // follow the true text.
    void learn(const Context& before, const int64_t* path, int64_t length, const int64_t* tokens,
               const int64_t* parents, int64_t size) {
        contexts_.assign(1, before);
        for (int64_t node = 0; node < size; ++node) {
            contexts_.push_back(contexts_[parents[node] + 1].followed_by(static_cast<Token>(tokens[node])));
        }
        for (int64_t row = 0; row <= size; ++row) {
            if (std::find(path, path + length, row) == path + length) {
                blend_.table.store_all(contexts_[row], candidates_[row]);
            }
        }
        for (int64_t i = 0; i < length; ++i) blend_.table.store_all(contexts_[path[i]], candidates_[path[i]]);
    }

    Blend blend_;
    SuffixIndex finished_;  // outputs of finished samples of all prompts
    std::unordered_map<std::string, Group> groups_;
    std::unordered_map<int64_t, Sample> samples_;
    double least_ = MIN_CLAIM;  // claims of less would not do for the last proposals, nor are they graded
    std::vector<Token> tokens_, emitted_;
    std::vector<Context> contexts_;
    std::vector<Candidates> candidates_;
};

}  // namespace

extern "C" {

void* drafter_new(int64_t contexts, int64_t finished_tokens) { return new Drafter(contexts, finished_tokens); }

void drafter_free(void* drafter) { delete static_cast<Drafter*>(drafter); }

void drafter_start(void* drafter, int64_t key, const char* group, int64_t group_length, const int64_t* tokens,
                   int64_t count, int64_t prompt_length) {
    static_cast<Drafter*>(drafter)->start(key, {group, static_cast<size_t>(group_length)}, Reader(tokens), count,
                                          prompt_length);
}

int64_t drafter_propose(void* drafter, const int64_t* input, int64_t count, double min_score, int64_t* ends,
                        int64_t* tokens, int64_t* parents, int64_t* sources, double* scores) {
    return static_cast<Drafter*>(drafter)->propose(Reader(input), count, min_score, ends,
                                                   {tokens, parents, sources, scores});
}

void drafter_observe(void* drafter, const int64_t* input, int64_t count, const int64_t* ids, const float* probabilities,
                     int64_t k) {
    static_cast<Drafter*>(drafter)->observe(Reader(input), count, ids, probabilities, k);
}

void drafter_finish(void* drafter, int64_t key, const int64_t* tokens, int64_t count) {
    static_cast<Drafter*>(drafter)->finish(key, Reader(tokens), count);
}
}
