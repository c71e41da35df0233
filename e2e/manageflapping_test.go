// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// confDirWatcher counts the inotify events of the conflist directory, as a runtime receives them.
type confDirWatcher struct {
	file   *os.File
	done   chan struct{}
	mu     sync.Mutex
	events int
	err    error
}

// watchConfDir watches the conflist directory until the end of the test.
func (n *node) watchConfDir(t *testing.T) *confDirWatcher {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	must(t, err)
	e := &confDirWatcher{file: os.NewFile(uintptr(fd), "inotify"), done: make(chan struct{})}
	const what = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_MOVED_TO | unix.IN_MOVED_FROM
	if _, err := unix.InotifyAddWatch(fd, n.cni.ConfDir, what); err != nil {
		t.Fatal(err)
	}
	go e.run()
	t.Cleanup(func() {
		err := e.file.Close()
		<-e.done
		if !errors.Is(e.err, os.ErrClosed) || err != nil {
			t.Errorf("inotify ended with %v, %v", e.err, err)
		}
	})
	return e
}

func (e *confDirWatcher) run() {
	defer close(e.done)
	buffer := make([]byte, 64<<10)
	for {
		n, err := e.file.Read(buffer)
		e.mu.Lock()
		for at := 0; at+unix.SizeofInotifyEvent <= n; {
			event := (*unix.InotifyEvent)(unsafe.Pointer(&buffer[at])) // #nosec G103 -- inotify(7) has it so
			e.events++
			at += unix.SizeofInotifyEvent + int(event.Len)
		}
		e.err = err
		e.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// count returns the number of events.
func (e *confDirWatcher) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.events
}

// newManaged makes a tamperNode whose conflist the reconciler manages.
func newManaged(t *testing.T, file string) *tamperNode {
	t.Helper()
	n := newNode(t, backends()[0])
	args := n.manageArgs(t, object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"10.0.0.0/8", "192.168.0.0/16", "fd00:9::/32", "fd00:7::/32"}})
	n.writeMainConflist(t, file, "podnet")
	w := &tamperNode{node: n, daemon: n.startReconciler(t, args...)}
	w.untilManaged(t, file)
	w.pods = onlyPod(n.pod(t, "podnet"))
	w.commitWatcher = n.watchCommits(t)
	w.checkVerdicts(t)
	w.right = w.ownedRules(t)
	return w
}

// TestManageFlapping removes the plugin entry as soon as it appears. It checks that the reconciler
// restores it at most ten times a second, names Cilium as the likely cause, and repairs rules meanwhile.
func TestManageFlapping(t *testing.T) {
	t.Parallel()
	const file = "05-cilium.conflist"
	w := newManaged(t, file)
	eye := w.watchConfDir(t)
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			if w.hasPluginEntry(t, file) {
				w.writeMainConflist(t, file, "podnet")
			}
		}
	}()
	defer func() { <-ended }()
	defer close(stop)
	began := time.Now()
	says := w.untilUnready(t, "conflist: ", file, "removed repeatedly", "Cilium", "cni.exclusive=false")
	t.Logf("detected after %s: %s", time.Since(began).Round(time.Millisecond), says)

	repairs, log := w.metric(t, "conflist_repairs_total"), w.log()
	before := eye.count()
	suspected := time.Now()
	for i := 0; time.Since(suspected) < 6*time.Second; i++ {
		count := w.untilIdle(t, 100*time.Millisecond)
		if i < 5 {
			w.spoil(t, tamperings()[0], i%2)
			w.repair(t, count)
		}
		if code, body := w.ready(); code != 503 || !strings.Contains(body, "Cilium") {
			t.Errorf("/readyz: %d %s", code, body)
		}
		time.Sleep(200 * time.Millisecond)
	}
	w.checkVerdicts(t)
	after := eye.count()
	made, took := w.metric(t, "conflist_repairs_total")-repairs, time.Since(suspected)
	t.Logf("%v repairs and %d events in %s", made, after-before, took.Round(time.Millisecond))
	if made > 10*took.Seconds()+1 || made < 2 || w.metric(t, "conflist_flapping") != 1 {
		t.Errorf("%v repairs in %s, conflist_flapping %v", made, took, w.metric(t, "conflist_flapping"))
	}
	if said := w.since(log); strings.Contains(said, "conflist") {
		t.Errorf("the log reports it more than once:\n%s", said)
	}

	stop <- struct{}{}
	w.until(t, "entry and readiness", func() bool { code, _ := w.ready(); return code == 200 && w.hasPluginEntry(t, file) })
	w.until(t, "its end in the log and the metrics", func() bool {
		return strings.Contains(w.since(log), "msg=ready") && w.metric(t, "conflist_present") == 1
	})
	w.writeMainConflist(t, file, "podnet")
	w.untilManaged(t, file)
	t.Logf("%.1f MiB", w.wantMemory(t))
}

// TestManageFastWriter has another program write the conflist every 30 ms, renamed or in place. It checks that the
// entry returns while that goes on, which the debounce of file events would not let it for a second, and that the
// reconciler reports the flapping.
func TestManageFastWriter(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.writeMainConflist(t, mainFile, "podnet")
	d := n.startReconciler(t, n.manageArgs(t, nil)...)
	d.untilManaged(t, mainFile)
	doc := n.mainConflist(t, "podnet")
	for name, write := range map[string]func(){
		"renamed":  func() { n.writeConflistFile(t, mainFile, doc) },
		"in place": func() { must(t, os.WriteFile(filepath.Join(n.cni.ConfDir, mainFile), doc, 0o644)) },
	} {
		var without time.Duration // the longest time
		last, written := time.Now(), time.Now()
		for began := time.Now(); time.Since(began) < 5*time.Second; time.Sleep(time.Millisecond) {
			if n.hasPluginEntry(t, mainFile) {
				last = time.Now()
			}
			without = max(without, time.Since(last))
			if time.Since(written) > 30*time.Millisecond {
				written = time.Now()
				write()
			}
		}
		t.Logf("%s: at most %s without the entry", name, without.Round(time.Millisecond))
		if timelimit.Exceeded(without, 700*time.Millisecond) {
			t.Errorf("%s: %s without the entry", name, without)
		}
		if d.metric(t, "conflist_flapping") != 1 {
			t.Errorf("%s: the flapping is not reported", name)
		}
	}
}
