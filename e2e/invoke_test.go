// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
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

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// request is a call of the plugin itself, without a runtime. The zero values
// make an ordinary one.
type invocation struct {
	verb         string
	conf         string // on stdin
	id           string // of the container
	noNetns      bool
	path         string // PATH; "" is the node's
	unprivileged bool   // without any privilege over the node's network
}

// answer is what came of it.
type result struct {
	stdout, stderr string
	exit           int
	code           uint // of the CNI error; 0 where there is none
	msg            string
	took           time.Duration
}

// prepare makes a request ready to run.
func (n *node) prepare(t *testing.T, r invocation) *topology.Cmd {
	t.Helper()
	c := n.Node.Command(n.timeout(t), n.plugin(t))
	if r.id == "" {
		r.id = "container"
	}
	if r.path == "" {
		r.path = n.path
	}
	c.Env = []string{"PATH=" + r.path, "CNI_COMMAND=" + r.verb, "CNI_CONTAINERID=" + r.id,
		"CNI_IFNAME=eth0", "CNI_PATH=" + strings.Join(n.cni.Path, ":")}
	if !r.noNetns {
		c.Env = append(c.Env, "CNI_NETNS=/run/netns/"+r.id)
	}
	if r.unprivileged {
		// Root of a user namespace that owns nothing.
		c.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		c.SysProcAttr.UidMappings = identity(os.Getuid())
		c.SysProcAttr.GidMappings = identity(os.Getgid())
	}
	c.Stdin = strings.NewReader(r.conf)
	return c
}

// ask runs the plugin. It fails the test where what it printed is not what the
// protocol wants.
func (n *node) invoke(t *testing.T, r invocation) result {
	t.Helper()
	return n.invokeAll(t, r)[0]
}

// askAll is ask, of all at once.
func (n *node) invokeAll(t *testing.T, requests ...invocation) []result {
	t.Helper()
	answers := make([]result, len(requests))
	errs := make([]error, len(requests))
	var all sync.WaitGroup
	for i, r := range requests {
		c, a := n.prepare(t, r), &answers[i]
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
	for i := range answers {
		var exit *exec.ExitError
		if errs[i] != nil && !errors.As(errs[i], &exit) {
			t.Fatal(errs[i])
		}
		answers[i].read(t, requests[i].verb)
	}
	return answers
}

// read reads the CNI error, if it is one.
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

// want fails the test unless the answer has the code, and says all of this in
// the error or, where there is none, in the warnings.
func (a result) want(t *testing.T, code uint, says ...string) result {
	t.Helper()
	if a.code != code {
		t.Fatalf("code %d: %s\nwant code %d; stderr:\n%s", a.code, a.msg, code, a.stderr)
	}
	said := a.msg
	if code == 0 {
		said = a.stderr
	}
	for _, s := range says {
		if !strings.Contains(said, s) {
			t.Errorf("does not say %q:\n%s", s, said)
		}
	}
	return a
}

// quiet fails the test if there was a warning.
func (a result) noWarnings(t *testing.T) {
	t.Helper()
	if a.stderr != "" {
		t.Errorf("warnings:\n%s", a.stderr)
	}
}

// conf is a network's entry as the runtime hands it to the plugin.
func (n *node) conf(t *testing.T, network string, keys object) string {
	t.Helper()
	entry := object{"cniVersion": "1.1.0", "name": network, "prevResult": object{
		"cniVersion": "1.1.0",
		"interfaces": []object{{"name": "eth0", "sandbox": "/run/netns/container"}},
		"ips":        []object{{"address": "10.1.0.2/16", "interface": 0}},
	}}
	maps.Copy(entry, keys)
	conf, err := json.Marshal(n.entry(entry))
	if err != nil {
		t.Fatal(err)
	}
	return string(conf)
}

// makeSure runs ADD, which has to succeed, and verifies by CHECK.
func (n *node) addAndCheck(t *testing.T, conf string) result {
	t.Helper()
	a := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	return a
}

// write puts a contribution into a node's state, as a reconciler or an ADD of
// another network does.
func (n *node) storeSource(t *testing.T, c policy.Source) {
	t.Helper()
	lock, err := store.Open(n.dataDir).Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	staged, err := lock.Stage(c)
	if err == nil {
		err = staged.Commit()
	}
	if err == nil {
		err = lock.Release()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// load reads the node's state.
func (n *node) load(t *testing.T) store.State {
	t.Helper()
	s, err := store.Open(n.dataDir).Load()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// attachments counts those of a network.
func (n *node) attachments(t *testing.T, network string) int {
	t.Helper()
	count, _, err := store.Open(n.dataDir).Attachments(network)
	if err != nil {
		t.Fatal(err)
	}
	return count
}

// network is the source that a network is.
func networkID(name string) policy.SourceID { return policy.SourceID{Kind: policy.Network, Name: name} }

// document is the path of the document of a network.
func (n *node) document(t *testing.T, name string) string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(n.dataDir, "sources", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
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
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// tree is all that stands in a directory: paths, modes and contents. A directory
// that is absent is empty.
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
			fmt.Fprintf(&b, "%s\n", readFile(t, path))
		}
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return b.String()
}

// agentFiles is what the agents' files contribute to the usual chain.
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
