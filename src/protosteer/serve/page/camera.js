// Pictures from the camera, to classify or to learn from. Browsers offer one to pages of this machine and over https; elsewhere
// a phone takes a photo through its own camera app.
"use strict";
const camera = { stream: null, taken: 0, use: "teach" };
const tellCamera = (text) => (camera.use === "teach" ? answer(text, "problem") : ($("try-problem").textContent = text));

async function openCamera(use) {
  if (camera.stream) closeCamera();
  camera.use = use;
  $("try-problem").textContent = "";
  try {
    camera.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch (error) {
    return tellCamera(whyNoCamera(error));
  }
  $("video").srcObject = camera.stream;
  document.querySelector(`[data-drop="${use}"]`).after($("viewfinder"));
  $("viewfinder").hidden = false;
  opener().hidden = true;
  camera.stream.getVideoTracks()[0].addEventListener("ended", closeCamera);  // pulled out, or taken back by the user
  $("snap").focus();
}

function whyNoCamera({ name, message }) {
  if (name === "NotAllowedError") return "The browser does not let this page use the camera; allow it beside the address and try again.";
  if (name === "NotFoundError") return "No camera was found; connect one and try again.";
  return `The camera cannot be used (${message || name}); choose files instead.`;
}

/** The frame as it is, at the camera's own size, like a file that was chosen. */
async function takePicture() {
  const video = $("video"), frame = el("canvas", { width: video.videoWidth, height: video.videoHeight });
  if (!video.videoWidth) return tellCamera("The camera is not ready yet; try again in a moment.");
  frame.getContext("2d").drawImage(video, 0, 0);
  const blob = await new Promise((done) => frame.toBlob(done, "image/jpeg", 0.92));
  (camera.use === "teach" ? addExamples : addShots)([new File([blob], `camera ${++camera.taken}.jpg`, { type: "image/jpeg" })]);
}

function closeCamera() {
  for (const track of camera.stream?.getTracks() ?? []) track.stop();
  camera.stream = $("video").srcObject = null;
  $("viewfinder").hidden = true;
  opener().hidden = false;
  opener().focus();
}
const opener = () => $(camera.use === "teach" ? "camera" : "photo");

function startCamera() {
  const live = navigator.mediaDevices?.getUserMedia;
  $("camera").hidden = !live;
  $("photo").hidden = !live && !matchMedia("(pointer: coarse)").matches;
  $("camera").addEventListener("click", () => openCamera("teach"));
  $("photo").addEventListener("click", () => (live ? openCamera("try") : $("photo-file").click()));
  $("snap").addEventListener("click", takePicture);
  $("camera-stop").addEventListener("click", closeCamera);
}
