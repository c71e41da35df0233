// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// startup measures the cost of starting a process.
func (b *bench) startup() error {
	binaries, err := topology.BinDir()
	if err != nil {
		return err
	}
	programs := [][]string{{binaries + "/bench/plugin-empty"}, {binaries + "/ip-masq"}, {binaries + "/bench/plugin-go-iptables"},
		{binaries + "/ip-masq-reconciler", "version"}}
	names := []string{empty, "ip-masq", "a plugin with go-iptables", "ip-masq-reconciler"}
	var contenders []measure.Contender
	for i, p := range programs {
		contenders = append(contenders, measure.Contender{Name: names[i], Run: func(int) (float64, error) {
			start := time.Now()
			out, err := about(p)
			if err != nil {
				return 0, fmt.Errorf("%w\n%s", err, out)
			}
			return milliseconds(time.Since(start)), nil
		}})
	}
	f, err := measure.Interleave(b.limit(120, 5*time.Second), contenders...)
	if err != nil {
		return err
	}
	s := b.report.section("Size and start-up")
	s.say("Each program prints its version and ends. *init* is the initialization of the packages before `main`. It is " +
		"measured with `GODEBUG=inittrace=1`; the figure is the sum of the medians.")
	rows := [][]string{{"program", "bytes", "× the empty plugin", "ms", "init, ms", "init, allocations"}}
	var costly [][]packageInit
	for i, p := range programs {
		info, err := os.Stat(p[0])
		if err != nil {
			return err
		}
		packages, err := initTrace(p, b.limit(20, 0).Rounds)
		if err != nil {
			return err
		}
		sum := packageInit{}
		for _, one := range packages {
			sum.clock, sum.allocs = sum.clock+one.clock, sum.allocs+one.allocs
		}
		costly = append(costly, packages)
		rows = append(rows, []string{names[i], chart.Thousands(int(info.Size())), f.Ratio(names[i], empty).String(), f.Of(names[i]).String(),
			measure.Short(sum.clock), measure.Short(sum.allocs)})
	}
	s.table(rows)
	s.say("These packages of ip-masq have the most expensive initialization. The last column has their cost in the empty " +
		"plugin.")
	rows = [][]string{{"package", "ip-masq, ms", "ip-masq, allocations", "an empty plugin, ms"}}
	for _, one := range costly[1][:min(12, len(costly[1]))] {
		other := "not linked"
		if at := slices.IndexFunc(costly[0], func(p packageInit) bool { return p.name == one.name }); at >= 0 {
			other = measure.Short(costly[0][at].clock)
		}
		rows = append(rows, []string{"`" + one.name + "`", measure.Short(one.clock), measure.Short(one.allocs), other})
	}
	s.table(rows)
	return nil
}

// about runs a program so that it only prints its name.
func about(program []string, env ...string) ([]byte, error) {
	c := exec.Command(program[0], program[1:]...)
	c.Env = append([]string{"PATH=/nowhere"}, env...)
	return c.CombinedOutput()
}

// packageInit is the cost of a package's initialization.
type packageInit struct {
	name          string
	clock, allocs float64 // ms; medians
}

// initTrace runs a program several times and returns its packages, the most expensive first.
func initTrace(program []string, runs int) ([]packageInit, error) {
	clocks, allocs := map[string]measure.Series{}, map[string]measure.Series{}
	for range runs {
		out, err := about(program, "GODEBUG=inittrace=1")
		if err != nil {
			return nil, fmt.Errorf("trace %s: %w", program[0], err)
		}
		for line := range bytes.Lines(out) {
			// init internal/godebug @0.13 ms, 0.008 ms clock, 512 bytes, 2 allocs
			words := strings.Fields(string(line))
			if len(words) != 11 || words[0] != "init" {
				continue
			}
			clock, err1 := strconv.ParseFloat(words[4], 64)
			count, err2 := strconv.ParseFloat(words[9], 64)
			if err := cmp.Or(err1, err2); err != nil {
				return nil, fmt.Errorf("trace %s: %q: %w", program[0], line, err)
			}
			clocks[words[1]], allocs[words[1]] = append(clocks[words[1]], clock), append(allocs[words[1]], count)
		}
	}
	var all []packageInit
	for name, s := range clocks {
		all = append(all, packageInit{name, s.Median(), allocs[name].Median()})
	}
	slices.SortFunc(all, func(a, b packageInit) int { return cmp.Or(cmp.Compare(b.clock, a.clock), cmp.Compare(a.name, b.name)) })
	return all, nil
}
