// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// invocation is a call of the plugin without a runtime. The zero values are those of an ordinary
// call.
type invocation struct {
	verb         string
	conf         string // network configuration on stdin
	id           string // container ID
	args         string // CNI_ARGS
	ifname       string // "" for eth0
	noNetns      bool
	path         string // PATH; "" for the node's
	unprivileged bool   // without privileges in the node's network namespace
	isSlow       bool   // it takes longer than timelimit.Wait
}

// result is the outcome of an invocation.
type result struct {
	stdout, stderr string
	exit           int
	code           uint // code of the CNI error; 0 without an error
	msg            string
	took           time.Duration
}

// prepare returns the command of an invocation.
func (n *node) prepare(t *testing.T, r invocation) *topology.Cmd {
	t.Helper()
	ctx := t.Context()
	if !r.isSlow {
		ctx = n.timeout(t)
	}
	c := n.Node.Command(ctx, n.plugin(t))
	if r.id == "" {
		r.id = "container"
	}
	if r.path == "" {
		r.path = n.path
	}
	c.Env = []string{"PATH=" + r.path, "CNI_COMMAND=" + r.verb, "CNI_CONTAINERID=" + r.id,
		"CNI_IFNAME=" + cmp.Or(r.ifname, "eth0"), "CNI_PATH=" + strings.Join(n.cni.Path, ":"), "CNI_ARGS=" + r.args}
	if !r.noNetns {
		c.Env = append(c.Env, "CNI_NETNS=/run/netns/"+r.id)
	}
	if r.unprivileged {
		// Root of a new user namespace, which does not own the network namespace.
		c.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		c.SysProcAttr.UidMappings = identity(os.Getuid())
		c.SysProcAttr.GidMappings = identity(os.Getgid())
	}
	c.Stdin = strings.NewReader(r.conf)
	return c
}

// invoke runs the plugin. It fails the test if the output violates the CNI protocol.
func (n *node) invoke(t *testing.T, r invocation) result {
	t.Helper()
	return n.invokeAll(t, r)[0]
}

// invokeAll runs invocations concurrently.
func (n *node) invokeAll(t *testing.T, invocations ...invocation) []result {
	t.Helper()
	results := make([]result, len(invocations))
	errs := make([]error, len(invocations))
	var all sync.WaitGroup
	for i, r := range invocations {
		c, a := n.prepare(t, r), &results[i]
		all.Go(func() {
			var stdout, stderr strings.Builder
			c.Stdout, c.Stderr = &stdout, &stderr
			start := time.Now()
			errs[i] = c.Run()
			*a = result{stdout: stdout.String(), stderr: stderr.String(), took: time.Since(start)}
			if c.ProcessState != nil {
				a.exit = c.ProcessState.ExitCode()
			}
		})
	}
	all.Wait()
	for i := range results {
		var exit *exec.ExitError
		if errs[i] != nil && !errors.As(errs[i], &exit) {
			t.Fatal(errs[i])
		}
		results[i].read(t, invocations[i].verb)
	}
	return results
}

// read parses the CNI error of a failed invocation.
func (a *result) read(t *testing.T, verb string) {
	t.Helper()
	if a.exit == 0 {
		return
	}
	var cniError struct {
		Code uint
		Msg  string
	}
	if err := json.Unmarshal([]byte(a.stdout), &cniError); err != nil || cniError.Code == 0 {
		t.Fatalf("%s: exit code %d with no CNI error on stdout (%v):\n%s%s", verb, a.exit, err, a.stdout, a.stderr)
	}
	a.code, a.msg = cniError.Code, cniError.Msg
}

// want fails the test unless the result has the code, and the error or, without an error, the
// warnings contain all of msgs.
func (a result) want(t *testing.T, code uint, msgs ...string) result {
	t.Helper()
	if a.code != code {
		t.Fatalf("code %d: %s\nwant code %d; stderr:\n%s", a.code, a.msg, code, a.stderr)
	}
	output := a.msg
	if code == 0 {
		output = a.stderr
	}
	wantText(t, "the message", output, msgs...)
	return a
}

// noWarnings fails the test if the plugin printed warnings.
func (a result) noWarnings(t *testing.T) {
	t.Helper()
	if a.stderr != "" {
		t.Errorf("warnings:\n%s", a.stderr)
	}
}

// conf returns a network's entry as a runtime passes it to the plugin.
func (n *node) conf(t *testing.T, network string, keys object) string {
	t.Helper()
	entry := object{"cniVersion": "1.1.0", "name": network, "prevResult": resultWith("10.1.0.2/16")}
	maps.Copy(entry, keys)
	conf := assert.Must(json.Marshal(n.entry(entry)))(t)
	return string(conf)
}

// resultWith returns the result of the plugin before, with the address of the pod.
func resultWith(address string) object {
	return object{
		"cniVersion": "1.1.0",
		"interfaces": []object{{"name": "eth0", "sandbox": "/run/netns/container"}},
		"ips":        []object{{"address": address, "interface": 0}},
	}
}

// succeeds fails the test unless a program that has run did what it was for.
func succeeds(t *testing.T, what string) func(stdout, stderr string, code int) {
	t.Helper()
	return func(stdout, stderr string, code int) {
		t.Helper()
		if code != 0 {
			t.Fatalf("%s: exit code %d\n%s%s", what, code, stdout, stderr)
		}
	}
}

// addAndCheck runs ADD and CHECK, which must succeed.
func (n *node) addAndCheck(t *testing.T, conf string) result {
	t.Helper()
	a := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	return a
}

// storeSource writes a source to the node's state, as the reconciler or an ADD of another network
// does.
func (n *node) storeSource(t *testing.T, c policy.Source) {
	t.Helper()
	lock := assert.Must(store.Open(n.dataDir).Lock(t.Context()))(t)
	must(t, errors.Join(lock.Put(c), lock.Release()))
}

// load reads the node's state.
func (n *node) load(t *testing.T) store.State {
	t.Helper()
	s := assert.Must(store.Open(n.dataDir).Load())(t)
	return s
}

// attachments returns the number of attachments of a network.
func (n *node) attachments(t *testing.T, network string) int {
	t.Helper()
	count, _, err := store.Open(n.dataDir).Attachments(network)
	must(t, err)
	return count
}

func (n *node) wantAttachments(t *testing.T, network string, want int) {
	t.Helper()
	wantSame(t, "attachments of "+network, n.attachments(t, network), want)
}

// networkID returns the source ID of a network.
func networkID(name string) policy.SourceID { return policy.SourceID{Kind: policy.Network, Name: name} }

// document returns the path of a network's document.
func (n *node) document(t *testing.T, name string) string {
	t.Helper()
	paths := assert.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*.json")))(t)
	for _, path := range paths {
		if bytes.Contains(readFile(t, path), []byte(fmt.Sprintf(`"name":%q`, name))) {
			return path
		}
	}
	t.Fatalf("network %s has no document among %v", name, paths)
	return ""
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	data := assert.Must(os.ReadFile(path))(t)
	return data
}

// tree returns the paths, modes and contents of all files in a directory. It returns "" if the
// directory does not exist.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s %s\n", info.Mode(), path)
		if info.Mode().IsRegular() {
			text := string(readFile(t, path))
			if strings.Contains(path, "/attachments/") {
				_, text, _ = strings.Cut(text, "\n") // without the time of the ADD
			}
			fmt.Fprintf(&b, "%s\n", text)
		}
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return b.String()
}

// agentFilesSource returns the source of the agent files for the default chain, changed by the
// function state.
func agentFilesSource(state func(*policy.SourcePolicy)) policy.Source {
	c := policy.Source{
		ID:     policy.SourceID{Kind: policy.AgentFiles},
		Policy: policy.SourcePolicy{Chain: policy.DefaultChain},
	}
	if state != nil {
		state(&c.Policy)
	}
	return c
}

func prefixes(texts ...string) []netip.Prefix {
	list := []netip.Prefix{}
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}
	return list
}
