// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/simulation/system"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var (
	seedFlag     = flag.Uint64("seed", 0, "replay this seed; 0: new seeds")
	durationFlag = flag.Duration("duration", 0, "how long to run new seeds")
	knownFlag    = flag.String("known", "", "regular expression of objections that are known, for a search beside them")
	withoutFlag  = flag.String("without", "", "operations to leave out, and fail")
	verboseFlag  = flag.Bool("effects", false, "print every effect of the seed")
)

// child is set for the test that runs on the simulated machine.
const child = "IPMASQ_SIMULATION"

// TestSimulation runs scenarios on a simulated machine. See doc.go.
func TestSimulation(t *testing.T) {
	if os.Getenv(child) == "" {
		cmd := exec.CommandContext(t.Context(), buildSimulation(t), "-test.run=^TestSimulation$", fmt.Sprintf("-test.v=%v", testing.Verbose()), "-test.timeout=0",
			fmt.Sprintf("-seed=%d", *seedFlag), fmt.Sprintf("-duration=%s", *durationFlag), fmt.Sprintf("-effects=%v", *verboseFlag), "-known="+*knownFlag, "-without="+*withoutFlag)
		cmd.Env = append(os.Environ(), child+"=1")
		out, err := cmd.CombinedOutput()
		if t.Logf("%s", out); err != nil {
			t.Fatal(err)
		}
		return
	}
	if *seedFlag != 0 {
		report(t, simulate(t, newScenario(*seedFlag)))
		return
	}
	first := uint64(time.Now().UnixNano() / 1000)
	t.Logf("first seed %d", first)
	counts := map[string]int{}
	began := time.Now()
	for seed := first; time.Since(began) < *durationFlag; seed++ {
		w := simulate(t, newScenario(seed))
		counts["runs"]++
		counts["effects"] += w.effects
		for what, n := range w.counts {
			counts[what] += n
		}
		if w.objection != "" && *knownFlag != "" && regexp.MustCompile(*knownFlag).MatchString(w.objection) {
			counts["known: "+reason(w.objection)]++
		} else if w.objection != "" {
			t.Logf("after %s and %v", time.Since(began).Round(time.Millisecond), counts)
			report(t, w)
			return
		}
	}
	t.Logf("%v", counts)
}

func report(t *testing.T, w *world) {
	if w.objection == "" && !*verboseFlag {
		return
	}
	if *verboseFlag {
		t.Logf("%s\n%s", w.scenario, strings.Join(w.trace, "\n"))
	}
	if w.objection == "" {
		return
	}
	small := shrink(t, w)
	t.Logf("%s\n%s\n%s", small.scenario, strings.Join(small.trace, "\n"), small.objection)
	t.Errorf("seed %d: %s", w.scenario.seed, w.objection)
}

// shrink returns a smaller scenario to which the oracle objects for the same reason.
func shrink(t *testing.T, w *world) *world {
	const orders = 5
	try := func(ops []*op) bool {
		for order := range uint64(orders) {
			s := *w.scenario
			s.ops, s.order = ops, order
			if next := simulate(t, &s); next.objection != "" && reason(next.objection) == reason(w.objection) {
				w = next
				return true
			}
		}
		return false
	}
	for shorter := true; shorter; {
		shorter = false
		for i := len(w.scenario.ops) - 1; i >= 0; i-- {
			shorter = try(slices.Delete(slices.Clone(w.scenario.ops), i, i+1)) || shorter
		}
		for i := range w.scenario.ops {
			simpler := *w.scenario.ops[i]
			simpler.kill, simpler.fail, simpler.wait = 0, 0, true
			if simpler != *w.scenario.ops[i] {
				ops := slices.Clone(w.scenario.ops)
				ops[i] = &simpler
				shorter = try(ops) || shorter
			}
		}
	}
	return w
}

// reason returns the words of an objection that do not depend on the scenario.
func reason(objection string) string {
	return strings.Join(regexp.MustCompile(`\b[a-z]{3,}\b`).FindAllString(objection, 12), " ")
}

// simulate runs a scenario.
func simulate(t *testing.T, s *scenario) (w *world) {
	synctest.Test(t, func(*testing.T) {
		r := rand.New(rand.NewPCG(s.seed, 2+s.order))
		w = &world{scenario: s, rand: r, switches: pick(r, 2, 5, 20, 100), counts: map[string]int{}}
		w.machine = system.NewMachine(rand.New(rand.NewPCG(s.seed, 3)))
		w.machine.Step = w.step
		w.kernel = newKernel(w.kernelEffect)
		w.kernel.legacy, w.kernel.noTables = s.legacy, !s.tables
		for _, a := range []string{"198.51.100.7", "2001:db8:ffff::7"} {
			w.kernel.addresses = append(w.kernel.addresses, policy.NodeAddress{Address: netip.MustParseAddr(a), Interface: "eth0", Up: true})
		}
		w.boot()
		for i := range s.nets {
			w.networks = append(w.networks, &network{netSpec: &s.nets[i], claims: []claim{{}}})
		}
		for i := range 9 {
			w.pods = append(w.pods, &pod{number: i, net: w.networks[0]})
		}
		for _, o := range s.ops {
			if w.do(o); w.objection != "" {
				break
			}
		}
		w.end()
	})
	return w
}
