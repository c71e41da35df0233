// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

func main() { os.Exit(sandbox.Enter(run)) }

func run() int {
	quick := flag.Bool("quick", false, "Run few rounds without the largest sizes, for development. The verdicts are not reliable.")
	docs := flag.String("docs", "", "Directory to write benchmarks/ and scale.md to. The default is docs, or bin/bench/quick for a quick or partial run.")
	only := flag.String("only", "", "Comma-separated sections to measure, for development. The report omits all other sections.")
	flag.Parse()
	if *docs == "" {
		*docs = "docs"
		if *quick || *only != "" {
			*docs = filepath.Join("bin", "bench", "quick")
		}
	}
	b := &bench{quick: *quick, report: newReport()}
	if err := b.run(*docs, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

// bench is one run of the benchmark.
type bench struct {
	quick  bool
	report *report
}

// part measures and reports one or more sections.
type part struct {
	name string
	run  func() error
}

func (b *bench) parts() []part {
	return []part{
		{"startup", b.startup},
		{"add", b.add},
		{"burst", b.burst},
		{"bridge", b.bridge},
		{"connections", b.connections},
		{"guard", b.guard},
		{"reset", b.reset},
		{"change", b.change},
		{"large", b.large},
		{"repair", b.repair},
		{"idle", b.idle},
		{"third-party-commits", b.thirdPartyCommits},
		{"churn", b.churn},
	}
}

func (b *bench) run(docs, only string) (err error) {
	began := time.Now()
	if b.report.busy, err = load(); err != nil {
		return err
	}
	remove, err := scene.Install()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	for _, p := range b.parts() {
		if only != "" && !strings.Contains(","+only+",", ","+p.name+",") {
			continue
		}
		start := time.Now()
		if err := p.run(); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		fmt.Printf("%-12s %5.1f s\n", p.name, time.Since(start).Seconds())
	}
	b.report.took = time.Since(began)
	b.report.quick, b.report.partial = b.quick, only != ""
	return b.report.write(filepath.Join(docs, "benchmarks"), filepath.Join(docs, "scale.md"))
}

// limit returns the limit of a comparison; a quick run has fewer rounds and less time.
func (b *bench) limit(rounds int, most time.Duration) measure.Limit {
	l := measure.Limit{Rounds: rounds, Least: min(5, rounds), Time: most}
	if b.quick {
		l = measure.Limit{Rounds: max(3, rounds/6), Least: 3, Time: most / 5}
	}
	return l
}

// sizes drops the largest size in a quick run.
func (b *bench) sizes(all ...int) []int {
	if b.quick {
		return all[:len(all)-1]
	}
	return all
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
