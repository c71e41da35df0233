// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/simulation/system"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

var (
	seedFlag     = flag.Uint64("seed", 0, "replay this seed; 0: new seeds")
	firstFlag    = flag.Uint64("first", 0, "begin with this seed; 0: a new one")
	durationFlag = flag.Duration("duration", 20*time.Second, "how long to run new seeds, in time of a processor")
	knownFlag    = flag.String("known", "", "regular expression of objections that are known, for a search beside them")
	programFlag  = flag.String("program", "", "keep the simulation as this program, and run nothing; it has the same flags")
	verboseFlag  = flag.Bool("effects", false, "print every effect of the seed")
)

// child is set for the test that runs on the simulated machine.
const child = "IPMASQ_SIMULATION"

// TestSimulation runs scenarios on a simulated machine. See doc.go.
func TestSimulation(t *testing.T) {
	if os.Getenv(child) == "" {
		program := buildSimulation(t, *programFlag)
		if *programFlag != "" {
			return
		}
		cmd := exec.CommandContext(t.Context(), program, "-test.run=^TestSimulation$", fmt.Sprintf("-test.v=%v", testing.Verbose()), "-test.timeout=0")
		flag.Visit(func(f *flag.Flag) {
			if !strings.HasPrefix(f.Name, "test.") {
				cmd.Args = append(cmd.Args, "-"+f.Name+"="+f.Value.String())
			}
		})
		cmd.Env = append(os.Environ(), child+"=1", "GOMAXPROCS=1") // so that a seed replays
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
	debug.SetGCPercent(400)
	const replayed = 50 // one in so many runs twice
	first := *firstFlag
	if first == 0 {
		first = uint64(time.Now().UnixMicro())
	}
	t.Logf("first seed %d", first)
	counts := map[string]int{}
	for seed := first; processorTime() < *durationFlag; seed++ {
		w := simulate(t, newScenario(seed))
		counts["runs"]++
		counts["effects"] += w.effects
		if seed%replayed == 0 {
			counts["replayed"]++
			if again := simulate(t, newScenario(seed)); !slices.Equal(again.trace, w.trace) {
				t.Fatalf("seed %d does not replay:\n%s", seed, cmp.Diff(w.trace, again.trace))
			}
		}
		for what, n := range w.counts {
			counts[what] += n
		}
		switch kind := "known: " + reason(w.objection); {
		case w.objection == "":
		case *knownFlag == "" || !regexp.MustCompile(*knownFlag).MatchString(w.objection):
			t.Logf("seed %d, after %s and %v: %s", seed, processorTime().Round(time.Millisecond), counts, w.objection)
			report(t, w)
			return
		default:
			if counts[kind]++; counts[kind] == 1 {
				t.Logf("seed %d: %s", seed, w.objection)
			}
		}
	}
	t.Logf("%v", counts)
}

// processorTime returns how long this program has run.
func processorTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// report prints every effect of a seed if that is asked for, and the smallest scenario with the same objection.
func report(t *testing.T, w *world) {
	if *verboseFlag {
		t.Logf("%s\n%s", w.scenario, strings.Join(w.trace, "\n"))
	}
	if w.objection != "" {
		small := shrink(t, w)
		t.Logf("%s\n%s\n%s", small.scenario, strings.Join(small.trace, "\n"), small.objection)
		t.Errorf("seed %d: %s", w.scenario.seed, w.objection)
	}
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
			simpler.event, simpler.wait = event{}, simpler.kind != "run"
			if simpler.kind == "fight" {
				simpler.kind = "tamper"
			}
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
		w = &world{scenario: s, rand: r, switches: pick(r, 2, 5, 20, 100), hurry: pick(r, 1, 1, 8, 40), holds: r.IntN(2) == 0, counts: map[string]int{}, probes: s.allProbes()}
		w.machine = system.NewMachine(rand.New(rand.NewPCG(s.seed, 3)))
		w.machine.Step = w.step
		w.kernel = newKernel(s)
		w.kernel.Before = func(text string, writes bool) error { return w.step(w.machine.Current(), "kernel: "+text, writes) }
		w.kernel.committed, w.kernel.deletes = w.committed, w.judgeDeletion
		w.kernel.boot(1)
		w.boot()
		w.book.unruled = true
		for i := range most + 1 {
			w.pods = append(w.pods, &pod{number: i})
		}
		for i := range s.nets {
			n := &network{netSpec: &s.nets[i], claims: []claim{{}}}
			source := policy.SourceID{Kind: policy.Network, Name: n.name}
			if n.agent {
				source = policy.SourceID{Kind: policy.AgentFiles}
			}
			n.document = store.Open(dataDir).DocumentPath(source)
			w.networks = append(w.networks, n)
			n.nobody = &pod{number: 100 + i, net: n, addresses: n.addresses(100 + i)}
			if w.pods = append(w.pods, n.nobody); n.agent {
				w.setConf(n, n.versions[0])
			}
		}
		if s.admin {
			w.machine.WriteFile(pluginFile, "")
		}
		if s.manage {
			w.writeAdministratorsFiles()
		}
		for _, o := range s.ops {
			if w.meanwhile(o); w.objection != "" {
				break
			}
			w.do(o)
		}
		w.end()
	})
	return w
}
