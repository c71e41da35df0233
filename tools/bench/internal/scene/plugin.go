// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Took is the cost of a plugin's run, from before its start to after its end.
type Took struct {
	Wall time.Duration
	CPU  time.Duration // of the plugin and of the programs that it ran
}

// call is a prepared run of a plugin.
type call struct {
	command *topology.Cmd
	output  *os.File
	files   []*os.File
}

// Request is a call of a plugin with the node's entry, for a new pod.
type Request struct {
	Plugin string
	Verb   string // "" is ADD
	Args   []string
	Env    []string // beside that of CNI
}

// nextPod returns a container ID; the IDs of a full node repeat.
func (n *Node) nextPod() string {
	const full = 250
	n.pods++
	return fmt.Sprintf("%064x", n.pods%full)
}

// Add runs ADD of a plugin.
func (n *Node) Add(plugin string) Took { return n.Run(Request{Plugin: plugin}) }

// Run runs a plugin and fails if the plugin does.
func (n *Node) Run(r Request) Took {
	c := n.prepare(r)
	defer c.close()
	start := time.Now()
	err := c.command.Run()
	wall := time.Since(start)
	c.succeeded(n, err)
	return Took{wall, c.command.ProcessState.UserTime() + c.command.ProcessState.SystemTime()}
}

// AddAtOnce runs ADDs of a plugin concurrently and returns the time until the last has ended.
func (n *Node) AddAtOnce(plugin string, adds int) time.Duration {
	calls := make([]*call, adds)
	for i := range calls {
		calls[i] = n.prepare(Request{Plugin: plugin})
		defer calls[i].close()
	}
	start := time.Now()
	for _, c := range calls {
		assert.NoError(n, c.command.Start())
	}
	errs := make([]error, adds)
	for i, c := range calls {
		errs[i] = c.command.Wait()
	}
	took := time.Since(start)
	for i, c := range calls {
		c.succeeded(n, errs[i])
	}
	return took
}

// prepare opens all files before the measurement: with files instead of pipes no goroutine copies
// data.
func (n *Node) prepare(r Request) *call {
	in, out := assert.Must(os.Open(n.stdin))(n), assert.Must(os.CreateTemp(n.Dir, "output"))(n)
	c := &call{command: n.Node.Command(context.Background(), n.Program(r.Plugin), r.Args...), output: out, files: []*os.File{in, out}}
	c.command.Env = append([]string{"PATH=" + n.programs, "CNI_COMMAND=" + cmp.Or(r.Verb, "ADD"), "CNI_CONTAINERID=" + n.nextPod(),
		"CNI_NETNS=" + n.pod.Path, "CNI_IFNAME=eth0", "CNI_PATH=" + n.binaries}, r.Env...)
	c.command.Stdin, c.command.Stdout, c.command.Stderr = in, out, out
	return c
}

// Program returns the path of ip-masq, or of a plugin of the benchmark.
func (n *Node) Program(plugin string) string {
	for _, dir := range []string{"", "bench"} {
		path := filepath.Join(n.binaries, dir, plugin)
		if info, err := os.Stat(path); err == nil && !info.IsDir() {
			return path
		}
	}
	return plugin
}

func (c *call) succeeded(t topology.T, err error) {
	if err != nil {
		t.Fatalf("%s: %v\n%s", c.command.Path, err, assert.Must(os.ReadFile(c.output.Name()))(t))
	}
}

func (c *call) close() {
	for _, f := range c.files {
		_ = f.Close() // the run has ended
	}
	_ = os.Remove(c.output.Name()) // the sandbox removes it otherwise
}
