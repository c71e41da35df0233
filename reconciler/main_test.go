// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// sandboxed runs the tests where they can do no harm.
type sandboxed struct{ *testing.M }

func (s sandboxed) Run() int { return sandbox.Run(s.M) }

func TestMain(m *testing.M) {
	testscript.Main(sandboxed{m}, map[string]func(){"ip-masq-reconciler": main})
}

// TestScripts runs the reconciler as people and systemd do. Each script is on a
// node of its own: a network namespace, which $NETNS names, and its own working
// directory, /run/script-NAME. There is no backend in PATH's way: scripts name
// the one that they mean.
func TestScripts(t *testing.T) {
	var cniCache sync.Mutex // of the sandbox, in which all uninstalls look for pods
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		WorkdirRoot:         "/run", // the sandbox's own, where nobody else may write
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       golden.Updating(),
		ContinueOnError:     true, // so that a change shows all that it does
		Setup: func(e *testscript.Env) error {
			if strings.Contains(e.WorkDir, "uninstall") {
				cniCache.Lock()
				e.Defer(cniCache.Unlock)
			}
			return setUp(e)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"node":    node,
			"json":    jsonFile,
			"text":    textFile,
			"answers": answers,
			"signal":  signalAll,
			"newer":   newer,
		},
	})
}

// setUp makes the node of a script.
func setUp(e *testscript.Env) error {
	name := filepath.Base(e.WorkDir)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := netns.Get()
	if err != nil {
		return fmt.Errorf("open network namespace: %w", err)
	}
	own, err := netns.NewNamed(name) // and enters it
	if err != nil {
		return errors.Join(fmt.Errorf("make network namespace: %w", err), before.Close())
	}
	e.Defer(func() {
		if err := errors.Join(own.Close(), netns.DeleteNamed(name), os.RemoveAll(e.WorkDir)); err != nil {
			e.T().Fatal(err)
		}
	})
	loopback, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(loopback)
	}
	if back := netns.Set(before); back != nil {
		panic(fmt.Sprintf("leave network namespace: %v", back)) // this thread is of no use to anybody
	}
	e.Setenv("NETNS", filepath.Join("/run/netns", name))
	return errors.Join(err, before.Close())
}

// node runs a program on the script's node:
//
//	node CODE PROGRAM ARGS...
//
// It has to exit with CODE. stdout and stderr are about it afterwards.
func node(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: node code program args...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	// Not `ip netns exec`, which mounts another /sys and so hides the cgroups.
	err = ts.Exec("nsenter", append([]string{"--net=" + ts.Getenv("NETNS"), "--"}, args[1:]...)...)
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// jsonFile writes what the last program printed, which has to be one JSON value,
// to a file in a form to compare: keys sorted, and what no two runs have in
// common as "...".
func jsonFile(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: json file")
	}
	d := json.NewDecoder(strings.NewReader(ts.ReadFile("stdout")))
	d.UseNumber()
	var answer any
	if err := d.Decode(&answer); err != nil {
		ts.Fatalf("stdout is no JSON: %v", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		ts.Fatalf("stdout is more than one JSON value")
	}
	checkKeys(ts, answer)
	f, err := os.Create(ts.MkAbs(args[0]))
	ts.Check(err)
	e := json.NewEncoder(f)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	ts.Check(errors.Join(e.Encode(steady(answer)), f.Close()))
}

// checkKeys checks that keys are in camel case, except the one that the contract writes otherwise, and that
// each explanation has the same ones.
func checkKeys(ts *testscript.TestScript, value any) {
	switch v := value.(type) {
	case map[string]any:
		keys := slices.DeleteFunc(slices.Sorted(maps.Keys(v)), func(key string) bool { return key == "reconciler" || key == "overridden_by" })
		for _, key := range keys {
			if !regexp.MustCompile(`^[a-z][a-zA-Z]*$`).MatchString(key) {
				ts.Fatalf("key %q is not in camel case", key)
			}
			checkKeys(ts, v[key])
		}
		const explained = "address addressInterface addressItem addressOrigin backend chain chains destination drift family guard interface kernel nextHops origin pod prefix problem reason rule source verdict"
		if _, is := v["verdict"]; is && strings.Join(keys, " ") != explained {
			ts.Fatalf("an explanation has the keys %s; want %s", keys, explained)
		}
	case []any:
		for _, item := range v {
			checkKeys(ts, item)
		}
	}
}

// textFile writes what the last program printed to a file in a form to compare:
// moments and ages as "...".
func textFile(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: text file")
	}
	moment := regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d UTC( \(\w+\))?`)
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(moment.ReplaceAllString(ts.ReadFile("stdout"), "...")), 0o644))
}

// volatile matches what differs from run to run by its nature: times.
func volatile(key string) bool {
	return regexp.MustCompile(`^(since|go|platform|pid)$`).MatchString(key)
}

func steady(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for key, item := range v {
			v[key] = steady(item)
			if volatile(key) && item != nil {
				v[key] = "..."
			}
		}
	case []any:
		for i, item := range v {
			v[i] = steady(item)
		}
	}
	return value
}

// answers requests a path of the health endpoint until the response has the status code and, if
// TEXT is given, a body that contains it. It fails after ten seconds:
//
//	answers CODE [:PORT]/PATH [TEXT]
//
// stdout is the body afterwards.
func answers(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 || len(args) > 3 {
		ts.Fatalf("usage: answers code [:port]/path [text]")
	}
	text := strings.Join(args[2:], "")
	client := http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: dialler(ts.Getenv("NETNS"))},
		Timeout:   time.Second,
	}
	url := "http://127.0.0.1:19820" + args[1]
	if strings.HasPrefix(args[1], ":") {
		url = "http://127.0.0.1" + args[1]
	}
	last := "nothing"
	if !timelimit.Await(timelimit.Wait, func() bool {
		r, err := client.Get(url)
		if err != nil {
			last = err.Error()
			return false
		}
		body, err := io.ReadAll(r.Body)
		if err := errors.Join(err, r.Body.Close()); err != nil {
			ts.Fatalf("read answer: %v", err)
		}
		last = fmt.Sprintf("%s\n%s", r.Status, body)
		if strconv.Itoa(r.StatusCode) == args[0] && strings.Contains(string(body), text) {
			_, err := ts.Stdout().Write(body)
			ts.Check(err)
			return true
		}
		return false
	}) {
		ts.Fatalf("%s: want %s, and had at last: %s", args[1], args[0], last)
	}
}

// dialler connects from within a network namespace.
func dialler(path string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		there, err := netns.GetFromPath(path)
		if err != nil {
			return nil, err
		}
		defer func() { _ = there.Close() }()
		// The thread is not given back, and so ends with the goroutine's lock.
		runtime.LockOSThread()
		before, err := netns.Get()
		if err != nil {
			return nil, err
		}
		defer func() { _ = before.Close() }()
		if err := netns.Set(there); err != nil {
			return nil, err
		}
		var d net.Dialer
		c, errDial := d.DialContext(ctx, network, address)
		if err := netns.Set(before); err != nil {
			return nil, err
		}
		runtime.UnlockOSThread()
		return c, errDial
	}
}

// signalAll sends a signal to the programs in the background.
func signalAll(ts *testscript.TestScript, neg bool, args []string) {
	signals := map[string]syscall.Signal{
		"TERM": syscall.SIGTERM, "HUP": syscall.SIGHUP, "KILL": syscall.SIGKILL, "STOP": syscall.SIGSTOP, "CONT": syscall.SIGCONT,
	}
	if neg || len(args) != 1 || signals[args[0]] == 0 {
		ts.Fatalf("usage: signal TERM|HUP|KILL|STOP|CONT")
	}
	for _, c := range ts.BackgroundCmds() {
		ts.Check(c.Process.Signal(signals[args[0]]))
	}
}

// newer makes the documents of a dataDir those of a version to come.
func newer(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: newer dataDir")
	}
	documents, err := filepath.Glob(filepath.Join(ts.MkAbs(args[0]), "sources", "*"))
	ts.Check(err)
	if len(documents) == 0 {
		ts.Fatalf("no documents in %s", args[0])
	}
	for _, d := range documents {
		text := strings.Replace(ts.ReadFile(d), fmt.Sprint(store.Schema()), fmt.Sprint(store.Schema()+1), 1) // the first number
		ts.Check(os.WriteFile(d, []byte(text), 0o600))
	}
}

// TestOutputIsEscaped checks that no command writes a control character of a program that answers in the
// reconciler's place on the socket.
func TestOutputIsEscaped(t *testing.T) {
	t.Parallel()
	const title = "\x1b]0;owned\a\x1b[2J\u009b31m"
	dataDir := serveStatus(t, answering(t, metrics.Status{
		Version: title, SettingsErr: title,
		Problems: []reconcile.Problem{{Reason: title, Err: errors.New(title)}, {Reason: reconcile.ReasonConflist, Err: errors.New(title)}},
	}))
	for _, command := range []string{"check", "status", "doctor", "render", "explain 10.0.0.1", "check -o json", "status -o json", "doctor -o json"} {
		args := append(strings.Fields(command), "--data-dir", dataDir, "--cni-conf-dir", t.TempDir())
		output, err := exec.CommandContext(t.Context(), "ip-masq-reconciler", args...).CombinedOutput()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		raw := func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }
		if strings.ContainsFunc(string(output), raw) {
			t.Errorf("%q writes %q", args, output)
		}
	}
}
